"""The best copy by validation loss, and when a client has waited long enough for a better one.

Shape suffix: S clients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import Examples
from fedmoe.training.batch import Loss
from fedmoe.training.devices import to_device


class EarlyStopping(NamedTuple):
    """Keep the best copy by `loss` on `data`; stop a client after `patience` checks without a better one."""

    loss: Loss
    data: Examples
    patience: int
    every: int = 1  # epochs between checks


class Best:
    """Copies of the best parameters so far: copies, never references that later steps overwrite."""

    def __init__(self, size: int, stopping: EarlyStopping) -> None:
        self.every, self.patience = stopping.every, stopping.patience
        self.loss_S = torch.full((size,), torch.inf)
        self.checks_since_S = torch.zeros(size, dtype=torch.int64)
        self.copies: dict[str, Tensor] = {}

    def keep(self, still_training: list[int], flat: dict[str, Tensor], losses: Tensor) -> list[int]:
        """Take copies where the loss improved; return the clients that go on."""
        self.copies = self.copies or {name: rows.clone() for name, rows in flat.items()}
        rows = torch.tensor(still_training, dtype=torch.int64)
        better = (losses < self.loss_S[rows]) | losses.isneginf()  # no validation examples: the last copy is kept
        self.checks_since_S[rows] += 1
        improved = rows[better]
        self.checks_since_S[improved] = 0
        self.loss_S[improved] = losses[better]
        for name, copies in self.copies.items():
            at = to_device(improved, copies.device)
            copies[at] = flat[name][at]
        return [s for s in still_training if self.checks_since_S[s] < self.patience]

    def restore(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.copies or flat
