"""Private states of a Ray cluster: one file on the driver's machine, served to actors on other machines by a keeper.

SQLite locks do not hold over network file systems. So whoever is on the machine of the file opens it, and everyone else
asks the keeper, an actor on that machine. States are versioned as on one machine, and any actor can take any client
over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import ClientId
from fedmoe.engines.extras import require

METHODS = (
    "read",
    "write",
    "have",
    "clients",
    "drop_superseded",
    "forget_from",
)  # what a worker calls of a store, by bytes


class Keeper:
    """The store as an actor."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._store = PrivateStore(path, run_id)

    def call(self, method: str, *arguments: Any) -> Any:
        if method not in METHODS:
            raise AttributeError(method)
        return getattr(self._store, method)(*arguments)


class RemoteStore(PrivateStore):
    """The same to a worker, through the keeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper, self._ray = keeper, require("ray", "ray")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(self._keeper.call.remote(method, *arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # in its own words

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
