"""scikit-learn's digits dealt to ten clients, each of which sees one label far more often than the others."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from builders import opened
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.assembly import build
from fedmoe.clients.federation import Federation
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.config import parse_config
from fedmoe.engines.session import Session
from fedmoe.evaluation.metrics import Score
from fedmoe.models.images import mlp

CLIENTS, CLASSES, HELD_OUT = 10, 10, 400


@cache
def digits() -> tuple[Tensor, Tensor]:
    images = load_digits()
    order = torch.randperm(len(images.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images.data, dtype=torch.float32)[order] / 16, torch.tensor(images.target)[order]


def skewed_digits(major: int = 60, minor: int = 4) -> Federation:
    """Client c has many examples of label c and a few of each other; the global test examples have all labels alike."""
    x, y = digits()
    rows_of = [(y[HELD_OUT:] == label).nonzero()[:, 0] + HELD_OUT for label in range(CLASSES)]
    parts = {}
    for client in range(CLIENTS):
        few = [rows_of[label][client * minor : (client + 1) * minor] for label in range(CLASSES)]
        rows = torch.cat([*few, rows_of[client][CLIENTS * minor :][:major]])  # no example has two owners
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(client))]
        parts[f"c{client}"] = {"train": (x[rows], y[rows])}
    return federation_from_clients(parts, num_classes=CLASSES, global_test=(x[:HELD_OUT], y[:HELD_OUT]))


def run_digits(factory: Callable[[AlgorithmSetup], Algorithm], store: Path, rounds: int = 15) -> list[Score]:
    """Rounds of everybody, delivery, personalisation: the scores."""
    alone = {"epochs": 30, "batch_size": 10, "learning_rate": 0.1, "optimizer": "sgd", "patience": 5}
    config = parse_config(
        {
            "training": {"federated": {**alone, "epochs": 2}, "local": alone, "personal": alone},
            "schedule": {"rounds": rounds, "clients_per_round": "all"},
            "engine": {"workers": 1, "backend": "batched", "cohort_size": CLIENTS},
        }
    )
    parts = build(
        config,
        federation=skewed_digits(),
        expert=lambda: mlp((64,), CLASSES, (32,)),
        gate=lambda: mlp((64,), 1, (4,)),
        algorithm=factory,
    )
    with opened(parts, store) as transport:
        session = Session(parts, transport)
        while not session.is_trained:
            session.next_round()
        session.deliver(range(CLIENTS))
        if parts.algorithm.personalize:
            list(session.personalize())
        return [score for batch in session.score() for score in batch]


def mean_accuracy(scores: list[Score], model: str, data: str) -> float:
    found = [score.accuracy for score in scores if (score.model, score.data) == (model, data)]
    return sum(found) / len(found)
