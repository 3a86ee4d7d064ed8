"""What an algorithm's clients would do, learnt by doing a little of it here: workers may be other processes."""

from typing import Any

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.clients.federation import Federation
from fedmoe.core_types import ClientId, Examples
from fedmoe.streams import Streams, derive_seed
from fedmoe.training.fallbacks import record_fallbacks

ROWS = 4  # of a client's examples: enough for a batch, and done at once


def native_fallbacks(algorithm: Algorithm, federation: Federation, seed: int = 0) -> list[str]:
    """Where the native backend would take single steps instead of whole epochs, and why; see `fallback_note`.

    One participant's round and personalisation are run on a few of its records and thrown away.
    """
    with record_fallbacks() as reasons:
        if len(federation.participants):
            _Rehearsal(algorithm, federation, int(federation.participants[0]), seed).run()
    return reasons


class _Rehearsal:
    def __init__(self, algorithm: Algorithm, federation: Federation, client: ClientId, seed: int) -> None:
        self.algorithm, self.client, self.seed = algorithm, client, seed
        self.opted_in = federation.data([client], opted_in_only=True).map(_few)
        self.everything = federation.data([client], opted_in_only=False).map(_few)
        self.server = algorithm.init_server(seed)
        self.state: Any = None
        self.personal: Any = None

    def run(self) -> None:
        updates: list[Any] = []
        for exchange in self.algorithm.round:
            self._take_part(exchange, self._receive(exchange, updates), updates)
        if self.algorithm.personalize is None:
            return
        updates = []
        *before, last = self.algorithm.delivery
        for exchange in before:
            self._take_part(exchange, self._receive(exchange, updates), updates)
        received = self._receive(last, updates)
        if received is not None:
            received_S, state_S = trees.stack([received]), trees.stack([self.state])
            personal_S = None if self.personal is None else trees.stack([self.personal])
            self.algorithm.personalize(received_S, state_S, personal_S, self.everything, self._rng("personalize"))

    def _receive(self, exchange: Exchange, updates: list[Any]) -> Any:
        received = exchange.broadcast(self.server, self.client, updates)
        if received is not None and self.state is None:
            seed = derive_seed(self.seed, "rehearsal", self.client)
            self.state = self.algorithm.init_client(received, self.client, seed)
            if self.algorithm.init_personal:
                self.personal = self.algorithm.init_personal(received, self.state, self.client, seed)
        return received

    def _take_part(self, exchange: Exchange, received: Any, updates: list[Any]) -> None:
        if received is None:
            return
        received_S, state_S = trees.stack([received]), trees.stack([self.state])
        rng = self._rng(exchange.name)
        new_S, update_S, _ = exchange.local_update(received_S, state_S, self.opted_in, rng)
        if exchange.private_update and self.personal is not None:
            personal_S = trees.stack([self.personal])
            exchange.private_update(received_S, state_S, personal_S, self.everything, rng)
        self.state = trees.pick(new_S, 0)
        updates.append(update_S[0] if isinstance(update_S, list) else trees.pick(update_S, 0))

    def _rng(self, scope: str) -> Streams:
        return Streams(self.seed, f"rehearsal:{scope}", 1, (self.client,))


def _few(examples: Examples) -> Examples:
    extra = {name: tensor[:, :ROWS] for name, tensor in examples.extra.items()}
    return Examples(examples.x[:, :ROWS], examples.y[:, :ROWS], examples.counts.clamp(max=ROWS), extra)
