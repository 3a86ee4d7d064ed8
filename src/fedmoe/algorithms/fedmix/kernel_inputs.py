"""What the native kernels need for whole epochs of FedMix's objective (native/fedmix_objective.h).

Shape suffixes: those of `models.expert_mixture`, N examples of a client, S clients of a cohort.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmoe.errors import DataError, MessageError
from fedmoe.native.kernel import check_tensor
from fedmoe.native.trainer import Objective
from fedmoe.training.kernel_spec import Shapes


class FedMixSettings(ctypes.Structure):
    """`struct FedMixSettings` in fedmix_objective.h: where the parts beside the experts start, and sizes."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_int64) for name in ("posterior", "gate_weight", "gate_bias")),
        *((name, ctypes.c_int64) for name in ("num_values", "num_experts", "num_features")),
        ("damping", ctypes.c_double),
    ]


@dataclass(frozen=True)
class FedMixKernel:
    """Implements `training.kernel_spec.KernelObjective`."""

    num_experts: int
    num_features: int
    num_values: int | None  # R; None where every client has a q of its own, the group `usage_group`
    condition_SN: Tensor  # of each example: which row of q
    expert_ids_SH: Tensor
    in_use_SH: Tensor  # bool
    shares_SR: Tensor
    damping: float = 1.0
    usage_group: str = ""

    function: ClassVar[str] = "fedmoe_train_fedmix"

    @property
    def shapes(self) -> Shapes:
        gate: Shapes = {"gate/weight": (self.num_experts, self.num_features), "gate/bias": (self.num_experts,)}
        return gate if self.num_values is None else {**gate, "posterior": (self.num_values, self.num_experts)}

    @property
    def other_groups(self) -> frozenset[str]:
        return frozenset({self.usage_group} if self.num_values is None else ())

    def bind(self, starts: Mapping[str, int], flat: Mapping[str, Tensor]) -> Objective:
        usage_SK = flat[self.usage_group] if self.num_values is None else None
        tensors = (self.condition_SN, self.expert_ids_SH, self.in_use_SH, self.shares_SR)
        inputs = (*(tensor.contiguous() for tensor in tensors), usage_SK)
        self._check(usage_SK)
        settings = FedMixSettings(
            starts.get("posterior", -1), starts["gate/weight"], starts["gate/bias"],
            self.num_values or 1, self.num_experts, self.num_features, self.damping,
        )  # fmt: skip
        return Objective(self.function, settings, inputs)

    def _check(self, usage_SK: Tensor | None) -> None:
        size, held = self.expert_ids_SH.shape
        check_tensor("expert_ids", self.expert_ids_SH, (size, held), torch.int64)
        check_tensor("in_use", self.in_use_SH, (size, held), torch.bool)
        lowest, highest = (int(k) for k in self.expert_ids_SH.aminmax()) if held and size else (0, 0)
        if lowest < 0 or highest >= self.num_experts:
            raise MessageError(
                f"expert_ids reach from {lowest} to {highest}, but there are {self.num_experts} experts: "
                "the message is of another model."
            )
        if usage_SK is not None:
            check_tensor("usage", usage_SK, (size, self.num_experts))
            return
        check_tensor("shares", self.shares_SR, (size, self.num_values or 0))
        check_tensor("the values that q is conditioned on", self.condition_SN, self.condition_SN.shape, torch.int64)
        lowest, highest = (int(r) for r in self.condition_SN.aminmax()) if self.condition_SN.numel() else (0, 0)
        if lowest < 0 or highest >= (self.num_values or 0):
            raise DataError(
                f"the values that q is conditioned on reach from {lowest} to {highest}, but q has {self.num_values} "
                "rows. Declare as many values as the data have."
            )
