"""What of a run's training will not be whole epochs in the native kernels: found by training one client briefly."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedmoe.assembly import Parts
from fedmoe.clients.federation import ClientDataset, Records, take
from fedmoe.core_types import ClientId
from fedmoe.engines.embedded import InProcess
from fedmoe.engines.session import Session
from fedmoe.engines.worker import Worker
from fedmoe.errors import FedmoeError
from fedmoe.training.fallbacks import fallback_note, record_fallbacks

ROWS = 2  # of each part of the client's data


def fallback_notes(parts: Parts) -> list[str]:
    """A sentence for each kind of local training that falls back; none on other backends, which have no whole epochs.

    An error that this meets is left to the run itself, which meets it in the open.
    """
    if parts.backend != "native":
        return []
    with record_fallbacks() as reasons, TemporaryDirectory(prefix="fedmoe-dry-run-") as folder:
        try:
            _train_one_client(_small(parts), Path(folder) / "private.sqlite")
        except FedmoeError:
            return []
    return [fallback_note(reason) for reason in reasons]


def _train_one_client(parts: Parts, store: Path) -> None:
    with InProcess(Worker(parts, store, "dry run")) as transport:
        session = Session(parts, transport)
        while not session.is_trained:
            session.next_round()
        session.deliver([int(parts.federation.participants[0])])
        if parts.algorithm.personalize:
            list(session.personalize())


def _small(parts: Parts) -> Parts:
    """One round of one client with two rows."""
    federation = parts.federation

    def load(client: ClientId) -> ClientDataset:
        whole, some = federation.load(client), slice(ROWS)
        opted_in = whole.train_opted_in.nonzero()[:ROWS, 0], whole.validation_opted_in.nonzero()[:ROWS, 0]
        return Records(
            take(whole.train, opted_in[0]),
            take(whole.validation, opted_in[1]),
            take(whole.test, some),
            *(torch.ones(len(rows), dtype=torch.bool) for rows in opted_in),
        )

    schedule = parts.config.schedule.model_copy(update={"rounds": 1})
    return replace(
        parts,
        config=parts.config.model_copy(update={"schedule": schedule}),
        federation=replace(federation, participants=federation.participants[:1], load=load),
        algorithm=parts.algorithm._replace(sample=lambda _server, _round, pool, _rng: pool),
    )
