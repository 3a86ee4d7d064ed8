"""Which version of its private state each client goes on from: the last one that counted.

A worker keeps what a client came to as soon as it is computed, before anybody knows whether the update will be accepted
or the round abandoned. So a message names the version to start from, and a state that did not count is never named.
"""

from collections.abc import Callable, Iterable, Mapping

from fedmoe.core_types import ClientId

NONE = 0  # the client has no state yet

Versions = Mapping[ClientId, int]


class StateVersions:
    def __init__(self, exchanges_per_step: int) -> None:
        self._width = exchanges_per_step
        self._last: dict[ClientId, int] = {}
        self._by_step: list[tuple[int, dict[ClientId, int]]] = []  # since states were last dropped

    def of(self, step: int, index: int = 0) -> int:
        """Of what clients come to in this exchange of this step; steps count from 1."""
        return step * self._width + index

    def count(self, step: int, versions: Versions) -> None:
        self._last |= versions
        self._by_step.append((step, dict(versions)))

    def after(self, newer: Versions) -> Callable[[ClientId], int]:
        """What a message names for a client; `newer` are those of the step that is under way."""
        return lambda client: newer.get(client, self._last.get(client, NONE))

    def last(self) -> dict[ClientId, int]:
        return dict(self._last)

    def superseded_by(self, step: int) -> dict[ClientId, int]:
        """The oldest version that a resume after `step` can name, for each client that moved on since last asked."""
        versions: dict[ClientId, int] = {}
        for _, changed in self._taken(step):
            versions |= changed
        return versions

    def _taken(self, step: int) -> Iterable[tuple[int, dict[ClientId, int]]]:
        done = [entry for entry in self._by_step if entry[0] <= step]
        self._by_step = [entry for entry in self._by_step if entry[0] > step]
        return done
