"""Copies of one network that train side by side, each with weights of its own for the examples.

Shape suffixes: S clients of a cohort, M copies, N examples of a client, B a batch, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Task
from fedmoe.native.kernel import check_tensor
from fedmoe.native.trainer import Objective
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.classifier import NO_KERNEL, predictions
from fedmoe.training.kernel_spec import KernelSpec, Shapes


def predictions_of(task: Task, network: Network, copies_M: Tensors, batch: Batch) -> Tensor:
    """(M, B, C)."""
    count = len(next(iter(copies_M.values())))
    return torch.stack([predictions(task, network, one, batch) for one in trees.unstack(copies_M, count)])


def losses_of(task: Task, network: Network, copies_M: Tensors, batch: Batch) -> Tensor:
    """(B, M)."""
    each_MBC = predictions_of(task, network, copies_M, batch)
    return torch.stack([task.losses(one_BC, batch.y) for one_BC in each_MBC], dim=-1)


@dataclass(frozen=True)
class WeightedCopiesLoss:
    """The sum over copies of weight times loss, for a group whose parameters have the copies as first axis.

    The weights (N, M) come with the examples, in `batch.extra`.
    """

    network: Network
    group: str
    weights: str
    task: Task = CLASSIFICATION

    def __call__(self, trainable: Trainable, _frozen: Tree, batch: Batch) -> Tensor:
        losses_BM = losses_of(self.task, self.network, trainable[self.group], batch)
        return (batch.extra[self.weights] * losses_BM).sum(-1)

    def kernel_spec(self, _params_S: Tree, data: Examples, _frozen_S: Tree) -> KernelSpec | str:
        if self.task != CLASSIFICATION:
            return NO_KERNEL
        kernel = WeightedCopiesKernel(self.group, data.extra[self.weights], tuple(data.y.shape))
        return KernelSpec({"": self.network}, num_copies=kernel.weights_SNM.shape[-1], objective=kernel)


@dataclass(frozen=True)
class WeightedCopiesKernel:
    """Implements `training.kernel_spec.KernelObjective`."""

    group: str
    weights_SNM: Tensor
    shape_of_labels: tuple[int, ...]  # (S, N)

    function: ClassVar[str] = "fedmoe_train_weighted_copies"
    other_groups: ClassVar[frozenset[str]] = frozenset()
    shapes: ClassVar[Shapes] = {}

    def bind(self, _starts: Mapping[str, int], _flat: Mapping[str, Tensor]) -> Objective:
        check_tensor("the examples' weights", self.weights_SNM, (*self.shape_of_labels, self.weights_SNM.shape[-1]))
        return Objective(self.function, inputs=(self.weights_SNM.contiguous(),))
