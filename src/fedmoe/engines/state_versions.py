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
        self._counted: dict[ClientId, int] = {}  # as of the step that superseded states were last asked for
        self._by_step: list[tuple[int, set[ClientId], dict[ClientId, int]]] = []  # since then

    def of(self, step: int, index: int = 0) -> int:
        """Of what clients come to in this exchange of this step; steps count from 1."""
        return step * self._width + index

    def count(self, step: int, asked: Iterable[ClientId], versions: Versions) -> None:
        """`versions` are those that counted, of some of the clients that were asked."""
        self._last |= versions
        self._by_step.append((step, set(asked), dict(versions)))

    def after(self, newer: Versions) -> Callable[[ClientId], int]:
        """What a message names for a client; `newer` are those of the step that is under way."""
        return lambda client: newer.get(client, self._last.get(client, NONE))

    def superseded_by(self, step: int) -> dict[ClientId, tuple[int, int]]:
        """What a resume after `step` or later cannot name, for each client that was asked since this was last called:
        (version, before) means whatever is older than `before`, but for `version`.

        Of clients whose updates were rejected, too: they would leave a state behind each time.
        """
        everyone: set[ClientId] = set()
        for _, asked, versions in (entry for entry in self._by_step if entry[0] <= step):
            everyone |= asked
            self._counted |= versions
        self._by_step = [entry for entry in self._by_step if entry[0] > step]
        return {client: (self._counted.get(client, NONE), self.of(step + 1)) for client in sorted(everyone)}
