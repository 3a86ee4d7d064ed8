"""A federation small enough to train in milliseconds, and a way to run any algorithm on it and keep what happened.

The cast of `tiny_federation`: 0 has some opted-out records, 1 has one training record and no validation record, 2 has
opted out altogether, 3 is plain, 4 opted out all its validation records, 5 holds nothing, 6 never trains.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fedmoe import assembly, trees, wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.config import ExperimentConfig, parse_config
from fedmoe.core_types import ClientId, Examples, Tensors, Tree
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.protocol import Transport
from fedmoe.engines.session import Session
from fedmoe.engines.steps import RoundRecord
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import torch_stream
from fedmoe.training.backends import Backend
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

FEATURES, CLASSES = 4, 3
TRAIN_SIZES = (9, 1, 8, 7, 6, 0, 5)
VALIDATION_SIZES = (4, 0, 3, 3, 5, 0, 3)
SOME_OPTED_OUT, ONE_RECORD, OPTED_OUT, PLAIN, NO_VALIDATION_IN, EMPTY, UNSEEN = range(7)
PARTICIPANTS = (SOME_OPTED_OUT, ONE_RECORD, PLAIN, NO_VALIDATION_IN)


def draw_examples(count: int, *path: int | str) -> Examples:
    """Three classes that a linear model can tell apart, with a little doubt."""
    generator = torch_stream("tiny", *path)
    x = torch.randn(count, FEATURES, generator=generator)
    doubt = 0.3 * torch.randn(count, CLASSES, generator=generator)
    return examples(x, (x[:, :CLASSES] + doubt).argmax(1))


def tiny_records() -> dict[ClientId, Records]:
    return {client: _records(client) for client in range(len(TRAIN_SIZES))}


def _records(client: ClientId) -> Records:
    train, validation = TRAIN_SIZES[client], VALIDATION_SIZES[client]
    train_in = torch.full((train,), client != OPTED_OUT)
    validation_in = torch.full((validation,), client not in (OPTED_OUT, NO_VALIDATION_IN))
    if client == SOME_OPTED_OUT:
        train_in[[1, 4, 8]] = False
        validation_in[0] = False
    return Records(
        train=draw_examples(train, client, "train"),
        validation=draw_examples(validation, client, "validation"),
        test=draw_examples(6, client, "test"),
        train_opted_in=train_in,
        validation_opted_in=validation_in,
    )


def tiny_federation(records: Mapping[ClientId, Records] | None = None) -> Federation:
    held = tiny_records() if records is None else records
    return Federation(
        num_clients=UNSEEN,
        num_unseen=1,
        num_classes=CLASSES,
        input_shape=(FEATURES,),
        participants=np.array(PARTICIPANTS),
        global_test=draw_examples(10, "global"),
        load=lambda client: held[client],
        digest="tiny",
    )


def make_expert() -> nn.Module:
    return mlp((FEATURES,), CLASSES, (5,))


def make_gate() -> nn.Module:
    return mlp((FEATURES,), 1, (3,))


def tiny_plan(epochs: int = 2) -> LocalTraining:
    return LocalTraining(epochs=epochs, batch_size=4, learning_rate=0.2, optimizer="sgd", patience=2)


def tiny_setup(backend: Backend = "batched", clients_per_round: int | None = 3) -> AlgorithmSetup:
    expert, gate = Network(make_expert, "expert", (FEATURES,)), Network(make_gate, "gate", (FEATURES,))
    if backend == "native":
        expert.go_native()
        gate.go_native()
    return AlgorithmSetup(
        expert=expert,
        gate=gate,
        federated=LocalTrainer(tiny_plan(), backend),
        local=LocalTrainer(tiny_plan(3), backend),
        personal=LocalTrainer(tiny_plan(3), backend),
        clients_per_round=clients_per_round,
        num_clients=UNSEEN,
        num_participants=len(PARTICIPANTS),
        num_classes=CLASSES,
    )


def tiny_config(
    algorithm: str, *, rounds: int = 4, workers: int = 1, seed: int = 0, backend: Backend = "batched", **schedule: Any
) -> ExperimentConfig:
    plans = {
        name: {"batch_size": 4, "learning_rate": 0.2, "optimizer": "sgd"} for name in ("federated", "local", "personal")
    }
    plans["local"]["epochs"] = plans["personal"]["epochs"] = 3
    return parse_config(
        {
            "seed": seed,
            "algorithm": {"name": algorithm},
            "training": plans,
            "schedule": {"rounds": rounds, "clients_per_round": 3, **schedule},
            "engine": {"workers": workers, "backend": backend, "cohort_size": 2},
        }
    )


PrivateRows = dict[tuple[str, ClientId, int], bytes]


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind, on both sides."""

    server: Tree
    delivered: dict[ClientId, Tree]
    records: list[RoundRecord]
    scores: list[Score]
    manifest: dict[str, Any]
    private: PrivateRows

    def fingerprint(self) -> dict[str, str]:
        """Equal for runs that agree to the last bit."""
        timeless = [record._replace(seconds=0.0) for record in self.records]
        return {
            "server": digest(trees.to_bytes(self.server)),
            "delivered": digest(*(trees.to_bytes(tree) for _, tree in sorted(self.delivered.items()))),
            "records": repr(timeless),
            "scores": repr(self.scores),
            "manifest": json.dumps(self.manifest),
            "private": digest(*(repr(key).encode() + row for key, row in sorted(self.private.items()))),
        }

    def private_tensors(self) -> dict[str, Tensor]:
        return {
            f"{kind} of client {client} at {version}: {name}": tensor
            for (kind, client, version), row in self.private.items()
            for name, tensor in load(row).items()
        }


def digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"|".join(parts), digest_size=16).hexdigest()


def read_private(path: Path) -> PrivateRows:
    if not path.exists():
        return {}  # no client had anything to keep
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT kind, client, version, tensors FROM state").fetchall()
    return {(kind, client, version): tensors for kind, client, version, tensors in rows}


def newest_private(path: Path, kind: str, state_type: type[Any], client: ClientId) -> Any:
    rows = {version: row for (k, c, version), row in read_private(path).items() if (k, c) == (kind, client)}
    return trees.from_named(state_type, load(rows[max(rows)]))


RUN_ID = "0" * 32


def tiny_parts(
    algorithm: Algorithm,
    federation: Federation | None = None,
    *,
    seed: int = 0,
    rounds: int = 2,
    workers: int = 1,
    cohort_size: int = 2,
    **schedule: Any,
) -> Parts:
    config = parse_config(
        {
            "seed": seed,
            "schedule": {"rounds": rounds, **schedule},
            "engine": {"workers": workers, "cohort_size": cohort_size, "backend": "sequential"},
        }
    )
    return assembly.build(
        config,
        federation=federation or tiny_federation(),
        expert=make_expert,
        gate=make_gate,
        algorithm=lambda _setup: algorithm,
    )


def opened(parts: Parts, store: Path) -> AbstractContextManager[Transport]:
    store.parent.mkdir(parents=True, exist_ok=True)
    return open_transport(parts, store, RUN_ID)


def run_algorithm(
    algorithm: Algorithm,
    federation: Federation,
    store: Path,
    *,
    through: Callable[[Transport], Transport] = lambda transport: transport,
    **options: Any,
) -> Outcome:
    """Rounds, release if asked, delivery, personalisation, scores. `through` may put something around the transport."""
    parts = tiny_parts(algorithm, federation, **options)
    with opened(parts, store) as transport:
        session, records = Session(parts, through(transport)), []
        while not session.is_trained:
            records.append(session.next_round())
        session.deliver(range(federation.num_clients + federation.num_unseen))
        if algorithm.personalize:
            list(session.personalize())
        scores = sorted(score for batch in session.score() for score in batch)
    return Outcome(session.server, session.delivered, records, scores, session.manifest.as_dict(), read_private(store))


class Sent(NamedTuple):
    """A frame that a worker sent, and the header of the one that it replies to."""

    asked: dict[str, Any]
    frame: bytes

    @property
    def messages(self) -> dict[ClientId, list[Tensors]]:
        """[update, report] by client, for the reply to an exchange."""
        return {client: list(pair) for client, pair in messages_in(self.frame).items()}


def messages_in(reply: bytes) -> dict[ClientId, tuple[Tensors, Tensors]]:
    """(update, report) by client, for the reply to an exchange."""
    header, blobs = wire.unpack(reply)
    found = {}
    for group, blob in zip(header["groups"], blobs, strict=True):
        update_S, report_S = wire.decode_reply(blob)
        for s, client in enumerate(group):
            found[client] = ({n: t[s] for n, t in update_S.items()}, {n: t[s] for n, t in report_S.items()})
    return found


def with_updates(reply: bytes, clients: Sequence[ClientId], change: Callable[[Tensors], Tensors | bytes]) -> bytes:
    """The same reply with other updates of some clients, each client for itself."""
    groups, blobs = [], []
    header, _ = wire.unpack(reply)
    for client, (update, report) in messages_in(reply).items():
        changed = change(update) if client in clients else update
        groups.append([client])
        blobs.append([changed if isinstance(changed, bytes) else alone(changed, report)])
    return wire.pack({**header, "groups": groups}, blobs)


def alone(update: Tensors, report: Tensors) -> bytes:
    named = {f"update/{name}": t for name, t in update.items()} | {f"report/{name}": t for name, t in report.items()}
    return save({name: tensor[None].contiguous() for name, tensor in named.items()})


class Around:
    """A transport around another one."""

    trusted = True

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        yield from self.inner.run(frames)

    def personal_model(self, *arguments: Any) -> PersonalModel:
        return self.inner.personal_model(*arguments)


class Spy(Around):
    """A transport that keeps what workers send and what they are sent."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent: list[Sent] = []
        self.received: list[bytes] = []

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        self.received += frames
        for index, reply in self.inner.run(frames):
            self.sent.append(Sent(wire.unpack(frames[index])[0], reply))
            yield index, reply

    @property
    def exchanged(self) -> list[Sent]:
        return [one for one in self.sent if one.asked["do"] == "exchange"]


def run_spied(algorithm: Algorithm, federation: Federation, store: Path, **options: Any) -> tuple[Outcome, Spy]:
    """`run_algorithm`, and all that passed between coordinator and workers."""
    spies: list[Spy] = []

    def through(transport: Transport) -> Transport:
        spies.append(Spy(transport))
        return spies[0]

    return run_algorithm(algorithm, federation, store, through=through, **options), spies[0]


def with_clients_in_other_order(algorithm: Algorithm) -> Algorithm:
    """The same draw, listed backwards."""
    return algorithm._replace(sample=lambda *arguments: algorithm.sample(*arguments)[::-1])


class Backwards(Around):
    """A transport whose replies arrive in the opposite order."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        last = len(frames) - 1
        yield from ((last - index, reply) for index, reply in self.inner.run(frames[::-1]))


def with_records(federation: Federation, changed: Mapping[ClientId, Records]) -> Federation:
    return replace(federation, load=lambda client: changed[client] if client in changed else federation.load(client))
