"""Where a node keeps what, and with what its worker is started. Needs no torch."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmoe.errors import ConfigError

CONFIG_FILE = "fedmoe.toml"
HOME = "FEDMOE_SILO_HOME"  # environment variable: the folder of nodes and servers that name none


def silo_home() -> Path:
    return Path(os.environ.get(HOME) or "~/.fedmoe").expanduser()


@dataclass(frozen=True)
class Place:
    """A node: the app that runs there, the function that gives the client's data, and what its owner decided."""

    app: str  # folder of the app, with its config
    hook: str  # import string of client_data
    client: int
    home: str  # folder of what stays here
    node_config: dict[str, Any]
    run_config: dict[str, Any]
    agrees: bool  # to what the config asks for, where the node's owner did not say: virtual nodes have no other owner

    @classmethod
    def of(cls, app: Path, hook: str, context: Any, *, simulated: bool) -> "Place":
        node_config = dict(context.node_config)
        client = node_config.get("partition-id")
        if not isinstance(client, int):
            raise ConfigError(
                f"this node's partition-id is {client!r}, so it is not clear which client it serves. Start it with "
                "--node-config 'partition-id=0' (0, 1, 2 …)."
            )
        home = node_config.get("state-dir") or silo_home() / "nodes" / f"client-{client}"
        return cls(str(app), hook, client, str(home), node_config, dict(context.run_config), agrees=simulated)

    @property
    def key(self) -> str:
        """Another app, config or decision of the owner is another worker."""
        config = (Path(self.app) / CONFIG_FILE).read_bytes()
        told = {name: value for name, value in asdict(self).items() if name != "run_config"}
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode() + config, digest_size=8).hexdigest()

    def agreed(self, what: str) -> bool:
        """Whether this node sends scores ("send-scores") or private parts ("release")."""
        said = self.node_config.get(what, self.agrees)
        if not isinstance(said, bool):
            raise ConfigError(f"this node's {what} is {said!r}. Write true or false: --node-config '{what}=true'.")
        return said

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Place":
        return cls(**json.loads(text))
