"""What a session sends: the work of a cohort as one frame, in which equal broadcasts are there once."""

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from fedmoe import trees, wire
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes, Parts

# Which tensors a broadcast holds, under which names.
Identity = tuple[tuple[str, int], ...]


class Cohort(NamedTuple):
    clients: list[ClientId]
    broadcasts: list[Tree]


class Frames(Sequence[Bytes]):
    """The frames of several cohorts, each made when it is asked for.

    A large model is then in memory once, and once for every worker at work, not once for every cohort.
    """

    def __init__(self, headers: list[dict[str, Any]], cohorts: Sequence[Cohort]) -> None:
        self._headers, self._cohorts = headers, cohorts
        self._encoded: dict[int, Parts] = {}

    def __len__(self) -> int:
        return len(self._headers)

    @overload
    def __getitem__(self, index: int) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Bytes]: ...
    def __getitem__(self, index: int | slice) -> Bytes | Sequence[Bytes]:
        if isinstance(index, slice):
            return Frames(self._headers[index], self._cohorts[index])
        return frame_of(self._headers[index], self._cohorts[index], self._encoded)


def frame_of(header: dict[str, Any], cohort: Cohort, encoded: dict[int, Parts]) -> Bytes:
    """A cohort's work; a broadcast that several clients share is encoded and sent once."""
    blobs: dict[int, int] = {}
    for broadcast in cohort.broadcasts:
        if id(broadcast) not in encoded:
            encoded[id(broadcast)] = wire.encode(broadcast)
        blobs.setdefault(id(broadcast), len(blobs))
    broadcast_index = [blobs[id(broadcast)] for broadcast in cohort.broadcasts]
    return wire.pack(
        {**header, "clients": cohort.clients, "broadcast_index": broadcast_index}, [encoded[one] for one in blobs]
    )


def shared(broadcasts: dict[ClientId, Tree]) -> dict[ClientId, Tree]:
    """The same object for clients that get the same tensors under the same names.

    Names too: the same tensors under other names, such as one start for several experts, are another message.
    """
    seen: dict[tuple[int, ...], Tree] = {}  # by its fields, which most algorithms take from the server as they are
    known: dict[Identity, Tree] = {}
    same = {}
    for client, broadcast in broadcasts.items():
        fields = tuple(map(id, broadcast))
        if fields not in seen:
            identity = tuple((name, id(leaf)) for name, leaf in trees.to_named(broadcast).items())
            seen[fields] = known.setdefault(identity, broadcast)
        same[client] = seen[fields]
    return same
