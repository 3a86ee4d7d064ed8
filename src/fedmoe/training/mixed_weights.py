"""Two models of one network whose weights are mixed: alpha v + (1 - alpha) w.

Shape suffix: S clients of a cohort.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Classification, Task
from fedmoe.native.kernel import check_tensor
from fedmoe.native.trainer import Objective
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.classifier import NO_KERNEL, predictions
from fedmoe.training.kernel_spec import KernelSpec, Shapes


def mixed(alpha: Tensor, own: Tensors, model: Tensors) -> Tensors:
    """alpha v + (1 - alpha) w, of one client."""
    return {name: alpha * own[name] + (1 - alpha) * model[name] for name in own}


@dataclass(frozen=True)
class MixedWeightsLoss:
    """For the group named "mixture" with the parts "own", v, and "model", w; `alpha` is a frozen part.

    The loss of the mixture, whose gradient reaches v alone; and, `with_model`, that of w. Without it, let the
    group name the weights of v as those that are trained.
    """

    network: Network
    with_model: bool
    task: Task = CLASSIFICATION

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        own, model = trainable["mixture"]["own"], trainable["mixture"]["model"]
        fixed = {name: tensor.detach() for name, tensor in model.items()}
        losses_B = self.of_weights(mixed(frozen["alpha"], own, fixed), batch)
        return losses_B + self.of_weights(model, batch) if self.with_model else losses_B

    def of_weights(self, weights: Tensors, batch: Batch) -> Tensor:
        return self.task.losses(predictions(self.task, self.network, weights, batch), batch.y)

    def kernel_spec(self, _params_S: Tree, _data: Examples, frozen_S: Tree) -> KernelSpec | str:
        if not isinstance(self.task, Classification):
            return NO_KERNEL
        networks = {"own/": self.network, "model/": self.network}
        return KernelSpec(networks, objective=MixedWeightsKernel(frozen_S["alpha"], self.with_model))


class MixedWeightsSettings(ctypes.Structure):
    """`struct MixedWeightsSettings` in training.h."""

    _fields_: ClassVar[list[Any]] = [("with_model", ctypes.c_int64)]


@dataclass(frozen=True)
class MixedWeightsKernel:
    """Implements `training.kernel_spec.KernelObjective`."""

    alpha_S: Tensor
    with_model: bool

    function: ClassVar[str] = "fedmoe_train_mixed_weights"
    other_groups: ClassVar[frozenset[str]] = frozenset()
    shapes: ClassVar[Shapes] = {}

    def bind(self, _starts: Mapping[str, int], flat: Mapping[str, Tensor]) -> Objective:
        check_tensor("alpha", self.alpha_S, (len(flat["mixture"]),))
        return Objective(self.function, MixedWeightsSettings(self.with_model), (self.alpha_S.contiguous(),))
