"""A federation small enough to train in milliseconds, with every kind of client that an algorithm must cope with.

The clients of `tiny_federation`: 0 has some opted-out records, 1 has one training record and no validation record, 2
has opted out altogether, 3 is plain, 4 opted out all its validation records, 5 holds nothing, 6 never trains.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.config import ExperimentConfig, parse_config
from fedmoe.core_types import ClientId, Examples
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.models.start_weights import filled
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


def with_records(federation: Federation, changed: Mapping[ClientId, Records]) -> Federation:
    return replace(federation, load=lambda client: changed[client] if client in changed else federation.load(client))


def make_expert() -> nn.Module:
    return mlp((FEATURES,), CLASSES, (5,))


def make_gate() -> nn.Module:
    return mlp((FEATURES,), 1, (3,))


def make_common_expert() -> nn.Module:
    """The same weights each time."""
    weights = Network(make_expert, "expert", (FEATURES,)).init("tiny common expert")
    return filled(make_expert(), weights, "the tiny common expert", 0.0)


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
        common=tiny_common_expert(backend),
    )


def tiny_common_expert(backend: Backend = "batched") -> CommonExpert:
    """One that knows nothing, but tells examples apart."""
    module = make_common_expert()
    common = CommonExpert(module, module.state_dict(), torch.zeros(2, FEATURES), CLASSES)
    if backend == "native":
        common.network.go_native()
    return common


def tiny_config(
    algorithm: str | None = None,
    *,
    rounds: int = 4,
    workers: int = 1,
    seed: int = 0,
    backend: Backend = "batched",
    **schedule: Any,
) -> ExperimentConfig:
    plans: dict[str, dict[str, Any]] = {
        name: {"batch_size": 4, "learning_rate": 0.2, "optimizer": "sgd"} for name in ("federated", "local", "personal")
    }
    plans["local"]["epochs"] = plans["personal"]["epochs"] = 3
    return parse_config(
        {
            "seed": seed,
            **({"algorithm": {"name": algorithm}} if algorithm else {}),
            "training": plans,
            "schedule": {"rounds": rounds, "clients_per_round": 3, **schedule},
            "engine": {"workers": workers, "backend": backend, "cohort_size": 2},
        }
    )
