"""Any algorithm under differential privacy: nothing leaves a client but what noised steps came to.

The steps are the trainer's business (`training/privacy.py`). Here is taken out what would leave beside them: how many
records a client has, its losses in training and validation, and what it might release in the end.
"""

from typing import Any

import torch

from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Sample
from fedmoe.core_types import ClientData
from fedmoe.partition.split import Indices
from fedmoe.streams import Streams

COUNT = "num_examples"  # the field of updates by which clients are weighted


def privately(algorithm: Algorithm, clients_per_round: int | None) -> Algorithm:
    """Clients count alike, report nothing, and are asked for no validation or calibration: the last round counts."""
    return algorithm._replace(
        round=tuple(map(_without_counts, algorithm.round)),
        validation=None,
        after_rounds=(),
        sample=_of_those_left(algorithm.sample, clients_per_round),
    )


def _without_counts(exchange: Exchange) -> Exchange:
    def local_update(broadcast_S: Any, client_S: Any, opted_in: ClientData, rng: Streams) -> tuple[Any, Any, Any]:
        new_S, update_S, _report = exchange.local_update(broadcast_S, client_S, opted_in, rng)
        if COUNT in update_S._fields:
            update_S = update_S._replace(**{COUNT: torch.ones_like(getattr(update_S, COUNT))})
        return new_S, update_S, NoReport()

    return exchange._replace(local_update=local_update, report_type=NoReport)


def _of_those_left(sample: Sample, clients_per_round: int | None) -> Sample:
    """Clients leave when their budget is spent: then everyone who is left takes part."""

    def of_those_left(server: Any, round_number: int, pool: Indices, rng: Any, /) -> Indices:
        few = clients_per_round is not None and len(pool) <= clients_per_round
        return pool if few else sample(server, round_number, pool, rng)

    return of_those_left
