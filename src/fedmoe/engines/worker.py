"""The client's side of an engine: it replies to frames with frames, and alone reads and writes private state.

One worker serves many clients in a simulation; on a real node it serves one. What a client sends is decided here, by
the worker's own copy of the rules, whatever a request asks for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Exchange, Nothing
from fedmoe.assembly import Parts
from fedmoe.clients.privacy_ledger import PrivacyLedger
from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.encoding import Parts as EncodedParts
from fedmoe.engines.private_replies import OpenLedger, PrivateReplies
from fedmoe.engines.protocol import exchanges_of
from fedmoe.engines.requests import Header, read_request
from fedmoe.engines.scoring import Scorer
from fedmoe.engines.state_versions import NONE
from fedmoe.errors import FedmoeError, MessageError
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.evaluation.score_message import score_message
from fedmoe.private_steps import PrivateSteps
from fedmoe.streams import Streams


class Worker:
    """`handle(frame)` does one piece of work on one cohort."""

    def __init__(
        self,
        parts: Parts,
        store: Path,
        run_id: str,
        open_store: Callable[[Path, str], PrivateStore] = PrivateStore,
        keep_model: Callable[[PersonalModel, ClientId], None] | None = None,
        open_ledger: OpenLedger = PrivacyLedger,
    ) -> None:
        """`open_store` and `open_ledger` are for files that are not on this machine.

        `keep_model` is where personal models go that this worker is asked to export; else it exports none.
        """
        self._parts = parts
        self.algorithm, self.federation, self.config = parts.algorithm, parts.federation, parts.config
        self.seed, self._scorer = parts.config.seed, Scorer(parts)
        self._open_store, self._keep_model = partial(open_store, store, run_id), keep_model
        self._open_store().close()  # here, once: of several workers that make a new file, one finds it locked
        self._store: PrivateStore | None = None
        self._private_replies = PrivateReplies.of(parts, store, run_id, open_ledger)
        self._work = {
            "exchange": self.exchange,
            "personalize": self.personalize,
            "personalized": self.personalized,
            "score": self.score,
            "export": self.export,
            "validate": self.validate,
            "forget": self.forget,
            "drop": self.drop,
            "find_missing": self.find_missing,
        }

    @property
    def store(self) -> PrivateStore:
        """Opened at first use: an SQLite connection must not be carried across a fork."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def close(self) -> None:
        """Before another fork."""
        if self._store:
            self._store.close()
            self._store = None
        if self._private_replies:
            self._private_replies.close()

    def handle(self, frame: Bytes) -> Bytes:
        """An error that the user can fix travels back as a frame; a defect of ours raises here."""
        try:
            num_clients = self.federation.num_clients + self.federation.num_unseen
            header, blobs = read_request(frame, self.algorithm, num_clients)
            reply = self._work[header["do"]](header, blobs)
            if header.get("superseded"):
                self._drop(header["superseded"])
            return reply
        except FedmoeError as error:
            return wire.pack({"error": type(error).__name__, "message": str(error)})

    def exchange(self, header: Header, blobs: Sequence[memoryview]) -> Bytes:
        self._require_permission(header["phase"], header["clients"])
        if self._private_replies and header["phase"] == "round":
            groups, replies = self._private_replies.answer(header, blobs, self._exchange)
        else:
            groups, replies = self._exchange(header, blobs, None)
        return wire.pack({"reply_to": header["reply_to"], "groups": groups}, replies)

    def _exchange(
        self, header: Header, blobs: Sequence[memoryview], private_steps: PrivateSteps | None
    ) -> tuple[list[list[ClientId]], list[EncodedParts]]:
        """The groups of clients that reply together, and their replies. With privacy each replies for itself."""
        clients, version = header["clients"], header["version"]
        exchange = exchanges_of(self.algorithm, header["phase"])[header["index"]]
        received = self._received(exchange, header, blobs)
        states = self._client_states(received, header)
        shared_S, state_S = _together(received), trees.stack(states)
        rng = Streams(self.seed, f"{header['phase']}:{exchange.name}", header["round"], tuple(clients))
        rng = rng._replace(in_rounds=header["phase"] == "round")
        sending = rng._replace(private_steps=private_steps)  # private work has none: its noise would help nobody
        data = self.federation.data(clients, opted_in_only=True)
        new_S, update_S, report_S = exchange.local_update(shared_S, state_S, data, sending)
        if version is not None:
            self._keep("client", clients, new_S, version)
            self._work_in_private(exchange, header, received, states, shared_S, state_S, rng)
        groups, updates, reports = [clients], [update_S], [report_S]
        if isinstance(update_S, list) or private_steps:  # of different shapes, or paid for one by one
            each = update_S if isinstance(update_S, list) else trees.unstack(update_S, len(clients))
            groups = [[client] for client in clients]
            updates = [trees.stack([update]) for update in each]
            reports = [trees.stack([report]) for report in trees.unstack(report_S, len(clients))]
        return groups, list(map(wire.encode_reply, updates, reports))

    def personalize(self, header: Header, blobs: Sequence[memoryview]) -> Bytes:
        clients = header["clients"]
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        states = self._client_states(received, header)
        personal_S = self._personal_states(received, states, header) if self.algorithm.init_personal else None
        rng = Streams(self.seed, "personalize", 0, tuple(clients), in_rounds=False)
        data = self.federation.data(clients, opted_in_only=False)
        assert self.algorithm.personalize is not None
        final_S = self.algorithm.personalize(_together(received), trees.stack(states), personal_S, data, rng)
        self._keep("final", clients, final_S, header["version"])
        return wire.pack({"clients": clients})

    def personalized(self, header: Header, _blobs: Sequence[memoryview]) -> Bytes:
        return wire.pack({"clients": sorted(self.store.clients("final", header["version"]))})

    def drop(self, header: Header, _blobs: Sequence[memoryview]) -> Bytes:
        self._drop(header["states"])
        return wire.pack({"clients": [client for client, *_ in header["states"]]})

    def _drop(self, rows: Sequence[Sequence[int]]) -> None:
        self.store.drop_superseded({client: (version, before) for client, version, before in rows})

    def forget(self, header: Header, _blobs: Sequence[memoryview]) -> Bytes:
        self.store.forget_from(header["version"])
        return wire.pack({"clients": header["clients"]})

    def find_missing(self, header: Header, _blobs: Sequence[memoryview]) -> Bytes:
        wanted = dict(header["states"])
        kinds = ["client"] if self.algorithm.client_type is not Nothing else []
        kinds += ["personal"] if self.algorithm.init_personal else []
        found = [self.store.have(kind, wanted) for kind in kinds]
        return wire.pack({"clients": sorted(client for client in wanted if not all(client in have for have in found))})

    def score(self, header: Header, blobs: Sequence[memoryview]) -> Bytes:
        """Scores are sent where the worker's own rules allow it, else kept: whoever asks is told so."""
        clients = header["clients"]
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        states = self._client_states(received, header)
        answers = tuple(self.algorithm.scored_answers)
        messages = [
            score_message(self._scorer.scores(client, shared, state, self._final(client, header["final"])), answers)
            for client, shared, state in zip(clients, received, states, strict=True)
        ]
        if header["send"] and all(map(self._sends_scores, clients)):
            reply = {"reply_to": header["reply_to"], "groups": [[client] for client in clients]}
            return wire.pack(reply, list(map(wire.encode, messages)))
        version = header["final"] or max(header["state_versions"]) + 1
        self.store.save("scores", dict(zip(clients, messages, strict=True)), version)
        if header["send"]:
            raise MessageError(f"clients {clients} do not send scores: evaluation.clients_asked says so.")
        return wire.pack({"clients": clients})

    def export(self, header: Header, blobs: Sequence[memoryview]) -> Bytes:
        """Leave the clients' models where this side keeps them; nothing of them is sent."""
        if self._keep_model is None:
            raise MessageError("a request asks to export models, but none are exported here.")
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        for shared, client, state in zip(received, header["clients"], header["state_versions"], strict=True):
            self._keep_model(self.personal_model(shared, client, state, header["final"]), client)
        return wire.pack({"clients": header["clients"]})

    def validate(self, header: Header, blobs: Sequence[memoryview]) -> Bytes:
        """Scores that may end the rounds: of clients that train, on opted-in validation records alone."""
        clients = header["clients"]
        self._require_permission("validation", clients)
        if not all(map(self._sends_scores, clients)):
            raise MessageError(f"clients {clients} do not send scores: evaluation.clients_asked says so.")
        received = self._received(self.algorithm.delivery[-1], header, blobs)
        states = self._client_states(received, header)
        scored = map(self._scorer.validation_scores, clients, received, states)
        reply = {"reply_to": header["reply_to"], "groups": [[client] for client in clients]}
        return wire.pack(reply, [wire.encode(score_message(scores)) for scores in scored])

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> PersonalModel:
        own = self._client_state(delivered, client, state)
        personal = self._final(client, final)
        self.close()
        return self._parts.personal_model({"broadcast": delivered, "client": own, "personal": personal}, client)

    def _require_permission(self, phase: str, clients: Sequence[ClientId]) -> None:
        """Nothing leaves a client that opted out; private parts only where this side's config says so, too."""
        if phase == "release" and not self.config.schedule.release:
            raise MessageError("a request asks to release private parts, but schedule.release is off here.")
        takes_part = self.federation.may_send if phase == "delivery" else self.federation.participates
        for client in clients:
            if not takes_part(client):
                raise MessageError(f"client {client} does not take part in the training: it sends nothing.")

    def _sends_scores(self, client: ClientId) -> bool:
        wanted = self.config.evaluation.clients_asked
        return wanted == "all" or (wanted == "opted_in" and self.federation.may_send(client))

    def _work_in_private(
        self,
        exchange: Exchange,
        header: Header,
        received: Sequence[Tree],
        states: Sequence[Tree],
        shared_S: Tree,
        state_S: Tree,
        rng: Streams,
    ) -> None:
        """Beside the exchange, on all records, with streams of its own; what was sent is already fixed.

        An exchange without private work carries the personal states on: one version names all that a client has.
        """
        if self.algorithm.init_personal is None:
            return
        personal_S = self._personal_states(received, states, header)
        if exchange.private_update:
            data = self.federation.data(header["clients"], opted_in_only=False)
            here = rng._replace(scope=f"{rng.scope}:private")
            personal_S = exchange.private_update(shared_S, state_S, personal_S, data, here)
        self._keep("personal", header["clients"], personal_S, header["version"])

    def _personal_states(self, received: Sequence[Tree], states: Sequence[Tree], header: Header) -> Tree:
        """What each client's private work has come to, or its start: whoever else is in the cohort."""
        assert self.algorithm.init_personal is not None
        personal = []
        for client, version, shared, state in zip(
            header["clients"], header["state_versions"], received, states, strict=True
        ):
            if version == NONE:
                personal.append(self.algorithm.init_personal(shared, state, client, self.seed))
            else:
                personal.append(self.store.load("personal", self.algorithm.personal_type, client, version))
        return trees.stack(personal)

    def _received(self, exchange: Exchange, header: Header, blobs: Sequence[memoryview]) -> list[Tree]:
        distinct = [wire.decode(exchange.broadcast_type, blob) for blob in blobs]
        return [distinct[index] for index in header["broadcast_index"]]

    def _client_states(self, received: Sequence[Tree], header: Header) -> list[Tree]:
        asked = zip(received, header["clients"], header["state_versions"], strict=True)
        return [self._client_state(*one) for one in asked]

    def _client_state(self, shared: Tree, client: ClientId, version: int) -> Tree:
        if self.algorithm.client_type is Nothing:
            return Nothing()
        if version == NONE:
            return self.algorithm.init_client(shared, client, self.seed)
        return self.store.load("client", self.algorithm.client_type, client, version)

    def _final(self, client: ClientId, version: int | None) -> Tree | None:
        """What personalisation ended with, if there was one."""
        return None if version is None else self.store.load("final", self.algorithm.personal_type, client, version)

    def _keep(self, kind: str, clients: Sequence[ClientId], state_S: Tree, version: int) -> None:
        """`state_S` may be a list, one state for each client, where they differ in shape."""
        states = state_S if isinstance(state_S, list) else trees.unstack(state_S, len(clients))
        if any(map(trees.leaves, states)):
            self.store.save(kind, dict(zip(clients, states, strict=True)), version)


def _together(received: Sequence[Tree]) -> Tree:
    """The broadcasts of a cohort, stacked. The session sends together what is of one form; another server may not."""
    if len(received) == 1:  # no copy: a large model is in memory often enough
        return trees.tree_map(lambda leaf: leaf[None], received[0])
    try:
        return trees.stack(received)
    except (RuntimeError, KeyError, ValueError) as error:
        raise MessageError(f"the broadcasts of a request differ in names or shapes: {error}.") from error
