"""Run any algorithm on the tiny federation and keep all that happened, on both sides."""

import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from fedmoe import assembly, trees
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.config import parse_config
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.protocol import Transport
from fedmoe.engines.session import Session
from fedmoe.engines.steps import RoundRecord
from fedmoe.evaluation.metrics import Score
from fedmoe.testing.federation import make_expert, make_gate, tiny_federation
from fedmoe.testing.transports import Spy

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
        return run_session(parts, through(transport), store)


def run_session(parts: Parts, transport: Transport, store: Path) -> Outcome:
    """A whole run through an open transport; its private states are read from `store`."""
    session, records = Session(parts, transport), []
    while not session.is_trained:
        records.append(session.next_round())
    session.deliver(range(parts.federation.num_clients + parts.federation.num_unseen))
    if parts.algorithm.personalize:
        list(session.personalize())
    scores = sorted((score for batch in session.score() for score in batch), key=lambda score: score.place)
    return Outcome(session.server, session.delivered, records, scores, session.manifest.as_dict(), read_private(store))


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
