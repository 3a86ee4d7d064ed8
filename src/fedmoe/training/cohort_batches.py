"""The batches of a cohort: which rows come next, with their draws of noise and augmented.

Shape suffixes: R clients that take this step, B examples of a batch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.batches import batch_streams, take, take_many
from fedmoe.training.devices import computing_on, to_device
from fedmoe.training.group import Group
from fedmoe.training.inference import pad_rows


class CohortBatches:
    """`rows` are clients by their place in the cohort, `indices` the examples of each in a batch."""

    def __init__(self, groups: Mapping[str, Group], batch_size: int, rng: Streams, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self._order = {name: batch_streams(group.data, batch_size, rng) for name, group in groups.items()}
        self._noise = {name: rng.generators(f"noise:{name}") for name, group in groups.items() if group.noise}
        # Named alike for all groups, as batches are: groups with equal data see equal images.
        self._augment = {name: rng.generators("augment") for name, group in groups.items() if group.augmentation}

    def next_rows(self, name: str, rows: list[int]) -> list[Tensor]:
        return [next(self._order[name][s]) for s in rows]

    def of_one(self, name: str, row: int, index: Tensor) -> Batch:
        """Of a client that is alone in its cohort."""
        noise = self._noise_of(name, [row], [index])
        batch = take(self.groups[name].data, 0, index, noise[0] if noise else {})
        batch.x = self._augmented(name, [row], [index], batch.x[None])[0]
        return batch

    def of_many(self, name: str, rows: list[int], indices: list[Tensor]) -> tuple[Batch, Tensor]:
        """The batches of these clients side by side, and which of their examples are real (R, B)."""
        batches, real_RB = take_many(self.groups[name].data, rows, indices, self._noise_of(name, rows, indices))
        batches.x = self._augmented(name, rows, indices, batches.x)
        return batches, real_RB

    def _noise_of(self, name: str, rows: list[int], indices: list[Tensor]) -> list[Tensors]:
        draw = self.groups[name].noise
        if draw is None:
            return []
        return [draw(self._noise[name][s], len(index)) for s, index in zip(rows, indices, strict=True)]

    def _augmented(self, name: str, rows: list[int], indices: list[Tensor], x_RB: Tensor) -> Tensor:
        how = self.groups[name].augmentation
        if how is None:
            return x_RB
        draws = [how.draw(self._augment[name][s], len(index)) for s, index in zip(rows, indices, strict=True)]
        drawn = to_device(pad_rows(draws, x_RB.shape[1]).flatten(0, 1), self.device)
        with computing_on(self.device):
            return how.change(x_RB.flatten(0, 1), drawn).view_as(x_RB)
