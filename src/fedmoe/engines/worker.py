"""The client's side of an engine: answers frames with frames. Private state is read and written here and nowhere else.

One worker serves many clients in a simulation; on a real node it would serve one.
"""

from pathlib import Path
from typing import Any

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm, Exchange, Nothing
from fedmoe.clients.federation import Federation
from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.errors import FedmoeError
from fedmoe.evaluation.metrics import Score, score_examples
from fedmoe.streams import Streams


class Worker:
    """`handle(frame)` does one piece of work on one cohort."""

    def __init__(self, algorithm: Algorithm, federation: Federation, store: Path, seed: int) -> None:
        self.algorithm, self.federation, self.seed = algorithm, federation, seed
        self._store_path = store
        PrivateStore(store).close()  # here, once: of several workers that make a new file, one finds it locked
        self._store: PrivateStore | None = None

    @property
    def store(self) -> PrivateStore:
        """Opened at first use: an SQLite connection must not be carried across a fork."""
        if self._store is None:
            self._store = PrivateStore(self._store_path)
        return self._store

    def close(self) -> None:
        """Before another fork."""
        if self._store:
            self._store.close()
            self._store = None

    def handle(self, frame: Bytes) -> Bytes:
        """An error that the user can mend travels back as a frame; a defect of ours raises here."""
        header, blobs = wire.unpack(frame)
        try:
            answer: Bytes = getattr(self, f"do_{header['do']}")(header, blobs)
            return answer
        except FedmoeError as error:
            return wire.pack({"error": type(error).__name__, "message": str(error)})

    def do_exchange(self, header: dict[str, Any], blobs: list[memoryview]) -> Bytes:
        exchange = find_exchange(self.algorithm, header["phase"], header["index"])
        clients, clock = header["clients"], header["clock"]
        received = self._received(exchange, header, blobs)
        shared_S = trees.stack(received)
        state_S = trees.stack(
            [self._client_state(b, client, clock) for b, client in zip(received, clients, strict=True)]
        )
        rng = Streams(self.seed, f"{header['phase']}:{exchange.name}", header["round"], tuple(clients))
        data = self.federation.data(clients, opted_in_only=True)
        new_S, update_S, report_S = exchange.local_update(shared_S, state_S, data, rng)
        if header["keep"]:
            self._keep("client", clients, new_S, clock)
        if exchange.private_update and header["keep"]:
            self._work_in_private(exchange, header, received, shared_S, state_S, rng)
        groups, updates, reports = [clients], [update_S], [report_S]
        if isinstance(update_S, list):  # of different shapes: each client answers for itself
            groups = [[client] for client in clients]
            updates = [trees.stack([update]) for update in update_S]
            reports = [trees.stack([report]) for report in trees.unstack(report_S, len(clients))]
        return wire.pack(
            {"reply_to": header["reply_to"], "groups": groups}, list(map(wire.encode_reply, updates, reports))
        )

    def do_personalize(self, header: dict[str, Any], blobs: list[memoryview]) -> Bytes:
        clients, clock = header["clients"], header["clock"]
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        states = [self._client_state(b, client, clock) for b, client in zip(received, clients, strict=True)]
        personal_S = self._personal_states(received, states, header) if self.algorithm.init_personal else None
        rng = Streams(self.seed, "personalize", 0, tuple(clients))
        data = self.federation.data(clients, opted_in_only=False)
        assert self.algorithm.personalize is not None
        final_S = self.algorithm.personalize(trees.stack(received), trees.stack(states), personal_S, data, rng)
        self._keep("final", clients, final_S, clock)
        return wire.pack({"clients": clients})

    def do_personalized(self, header: dict[str, Any], _blobs: list[memoryview]) -> Bytes:
        return wire.pack({"clients": sorted(self.store.clients("final", header["clock"]))})

    def do_forget(self, header: dict[str, Any], _blobs: list[memoryview]) -> Bytes:
        self.store.forget_superseded(header["clock"])
        return wire.pack({})

    def do_score(self, header: dict[str, Any], blobs: list[memoryview]) -> Bytes:
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        scores = [
            score._asdict()
            for shared, client in zip(received, header["clients"], strict=True)
            for score in self._scores(shared, client, header["clock"], header["personalized"])
        ]
        return wire.pack({"clients": header["clients"], "scores": scores})

    def _scores(self, shared: Tree, client: ClientId, clock: int, personalized: bool) -> list[Score]:
        state = self._client_state(shared, client, clock)
        models: dict[str, Tree | None] = {"before": None} if self.algorithm.round else {}
        if self.algorithm.personalize and personalized:
            models["after"] = self.store.load("final", self.algorithm.personal_type, client, clock + 1)
        own = "pooled" if client == self.federation.pooled else "own"
        parts = {own: self.federation.load(client).test, "global": self.federation.global_test}
        unseen = client >= self.federation.num_clients
        return [
            Score(
                client, unseen, model, data,
                *score_examples(lambda x, p=personal: self.algorithm.predict(shared, state, p, x), rows),  # type: ignore[misc]
                len(rows.y),
            )
            for model, personal in models.items()
            for data, rows in parts.items()
            if len(rows.y)
        ]  # fmt: skip

    def _work_in_private(
        self,
        exchange: Exchange,
        header: dict[str, Any],
        received: list[Tree],
        shared_S: Tree,
        state_S: Tree,
        rng: Streams,
    ) -> None:
        """Beside the exchange, on all records, with streams of its own; what was sent is already fixed."""
        clients, clock = header["clients"], header["clock"]
        assert exchange.private_update is not None
        before_S = self._personal_states(received, trees.unstack(state_S, len(clients)), header)
        data = self.federation.data(clients, opted_in_only=False)
        here = rng._replace(scope=f"{rng.scope}:private")
        self._keep("personal", clients, exchange.private_update(shared_S, state_S, before_S, data, here), clock)

    def _personal_states(self, received: list[Tree], states: list[Tree], header: dict[str, Any]) -> Tree:
        """What each client's private work has come to, or its start: whoever else is in the cohort."""
        assert self.algorithm.init_personal is not None
        personal = []
        for client, shared, state in zip(header["clients"], received, states, strict=True):
            known = self.store.load("personal", self.algorithm.personal_type, client, header["clock"])
            personal.append(self.algorithm.init_personal(shared, state, client, self.seed) if known is None else known)
        return trees.stack(personal)

    def _received(self, exchange: Exchange, header: dict[str, Any], blobs: list[memoryview]) -> list[Tree]:
        distinct = [wire.decode(exchange.broadcast_type, blob) for blob in blobs]
        return [distinct[index] for index in header["broadcast_index"]]

    def _client_state(self, shared: Tree, client: ClientId, clock: int) -> Tree:
        if self.algorithm.client_type is Nothing:
            return Nothing()
        known = self.store.load("client", self.algorithm.client_type, client, clock)
        return self.algorithm.init_client(shared, client, self.seed) if known is None else known

    def _keep(self, kind: str, clients: list[ClientId], state_S: Tree, clock: int) -> None:
        if trees.leaves(state_S):
            states = {client: trees.pick(state_S, s) for s, client in enumerate(clients)}
            self.store.save(kind, states, clock)


def find_exchange(algorithm: Algorithm, phase: str, index: int) -> Exchange:
    if phase == "validation":
        assert algorithm.validation is not None
        return algorithm.validation.exchange
    if phase == "release":
        assert algorithm.release is not None
        return algorithm.release
    return (algorithm.round if phase == "round" else algorithm.delivery)[index]
