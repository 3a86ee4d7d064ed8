"""Private states and privacy ledger of a Ray cluster: files on the driver's machine, served to others by a keeper.

SQLite locks do not hold over network file systems. So whoever is on the machine of the files opens them, and everyone
else asks the keeper, an actor on that machine. States are versioned as on one machine, and any actor can take any
client over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmoe.clients.privacy_ledger import Paid, PrivacyLedger, ledger_beside
from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import ClientId
from fedmoe.engines.extras import require
from fedmoe.noise import NoiseKey, NoiseSource

# What a worker calls of a store, by bytes, and of a ledger.
METHODS = {
    "store": ("read", "write", "have", "clients", "drop_superseded", "forget_from"),
    "ledger": ("key", "next_step", "reply", "record"),
}


class Keeper:
    """The two files as an actor. The driver has made them."""

    def __init__(self, path: Path, run_id: str) -> None:
        ledger = ledger_beside(path)
        self._files = {
            "store": PrivateStore(path, run_id),
            "ledger": PrivacyLedger(ledger, run_id) if ledger.exists() else None,
        }

    def call(self, file: str, method: str, *arguments: Any) -> Any:
        if method not in METHODS[file]:
            raise AttributeError(method)
        return getattr(self._files[file], method)(*arguments)


class Remote:
    """One of the keeper's files."""

    def __init__(self, keeper: Any, file: str) -> None:
        self._keeper, self._file, self._ray = keeper, file, require("ray", "ray")

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(self._keeper.call.remote(self._file, method, *arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # in its own words


class RemoteStore(PrivateStore):
    """The same to a worker, through the keeper."""

    def __init__(self, keeper: Any) -> None:
        self._call = Remote(keeper, "store").call

    def read(self, kind: str, client: ClientId, version: int) -> bytes:
        state: bytes = self._call("read", kind, client, version)
        return state

    def write(self, kind: str, blobs: Mapping[ClientId, bytes], version: int) -> None:
        self._call("write", kind, dict(blobs), version)

    def have(self, kind: str, client_versions: Mapping[ClientId, int]) -> set[ClientId]:
        found: set[ClientId] = self._call("have", kind, dict(client_versions))
        return found

    def clients(self, kind: str, version: int) -> set[ClientId]:
        found: set[ClientId] = self._call("clients", kind, version)
        return found

    def drop_superseded(self, versions: Mapping[ClientId, tuple[int, int]]) -> None:
        self._call("drop_superseded", dict(versions))

    def forget_from(self, version: int) -> None:
        self._call("forget_from", version)

    def close(self) -> None:
        """The keeper's connection stays open as long as the keeper."""


class RemoteLedger(PrivacyLedger):
    """Likewise. A client's secret goes to whichever actor computes it: a cluster is one circle of trust."""

    def __init__(self, keeper: Any) -> None:
        self._call = Remote(keeper, "ledger").call

    def key(self, client: ClientId, source: NoiseSource, seed: int) -> NoiseKey:
        return NoiseKey(*self._call("key", client, source, seed))

    def next_step(self, client: ClientId) -> int:
        return int(self._call("next_step", client))

    def reply(self, client: ClientId, request: bytes) -> bytes | None:
        found: bytes | None = self._call("reply", client, request)
        return found

    def record(self, round_number: int, paid: Mapping[ClientId, Paid], keep_rounds: int) -> None:
        self._call("record", round_number, dict(paid), keep_rounds)

    def close(self) -> None:
        """As above."""
