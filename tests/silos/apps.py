"""An app of silos, for tests: its config and the data of its clients."""

from pathlib import Path
from typing import Any

import torch

from fedmoe.config import ExperimentConfig, parse_config, read_config
from fedmoe.silos.app_files import write_app

CLIENTS, CLASSES, FEATURES = 3, 3, 4


def silo_config(algorithm: str = "fedrep", *, privacy: dict[str, Any] | None = None, **flower: Any) -> ExperimentConfig:
    plan = {"epochs": 1, "batch_size": 4, "learning_rate": 0.1, "optimizer": "sgd"}
    declared = {"num_clients": CLIENTS, "num_classes": CLASSES, "input_shape": [FEATURES], **flower}
    private = {} if privacy is None else {"privacy": privacy}
    return parse_config({
        **private,
        "algorithm": {"name": algorithm},
        "model": {"name": "mlp", "hidden": [5]},
        "training": {"federated": plan, "personal": plan},
        "schedule": {"rounds": 3, "clients_per_round": "all"},
        "engine": {"name": "flower", "backend": "sequential", "flower": declared},
    })  # fmt: skip


def client_rows(client: int, rows: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def template_config(folder: Path) -> ExperimentConfig:
    write_app(folder)
    return read_config(folder / "fedmoe.toml")
