"""Experts that a client was sent and the router that weighs them, trained together (Dun et al. 2023, Section 4).

Shape suffixes: S clients of a cohort, M all experts, H those that a client holds, N examples, B a batch, F features.
"""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.errors import MessageError
from fedmoe.models.expert_mixture import log_likelihoods, log_marginal
from fedmoe.models.network import Network
from fedmoe.models.router import log_scores
from fedmoe.models.task import CLASSIFICATION
from fedmoe.native.kernel import check_tensor
from fedmoe.native.trainer import Objective
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.group import Fitted, Group
from fedmoe.training.kernel_spec import KernelSpec, Shapes
from fedmoe.training.local import LocalTrainer
from fedmoe.training.optimizers import Sgd
from fedmoe.training.weighted_copies import predictions_of

EMBEDDING = "embedding"  # of each example by the common expert, in `Examples.extra`
Experts = Literal["all", "sent"]


def log_probs_of(network: Network, experts_H: Tensors, batch: Batch) -> Tensor:
    """(H, B, C)."""
    return predictions_of(CLASSIFICATION, network, experts_H, batch)


@dataclass(frozen=True)
class RoutedLoss:
    """-log sum_{i held} g_i(x) f_i(y|x) of each example, for the groups "experts" and "router".

    g is the softmax over all M experts and is not renormalised over those held: a router that gives weight to an expert
    that was not sent pays for it. f are probabilities. `normalised_over="sent"` is another loss, in which g sums to 1
    over the experts held: those that were not sent then lose nothing to them.
    """

    expert: Network
    router: Network
    router_rate: float  # of the router's plain SGD
    normalised_over: Experts = "all"

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        log_gate_BM = log_scores(self.router, trainable["router"], batch.extra[EMBEDDING])
        log_gate_BH = log_gate_BM.T[frozen["expert_ids"]].T
        if self.normalised_over == "sent":
            log_gate_BH = F.log_softmax(log_gate_BH, dim=-1)
        log_probs_HBC = log_probs_of(self.expert, trainable["experts"], batch)
        return -log_marginal(log_gate_BH, log_likelihoods(log_probs_HBC, batch.y))

    def kernel_spec(self, _params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str:
        kernel = RoutedKernel(
            shapes_of_router={name: tuple(tensor.shape) for name, tensor in sorted(self.router.init(0).items())},
            rate=self.router_rate,
            over_sent=self.normalised_over == "sent",
            expert_ids_SH=frozen_S["expert_ids"],
            embedding_SNF=data.extra[EMBEDDING],
            shape_of_labels=tuple(data.y.shape),
        )
        return KernelSpec({"": self.expert}, num_copies=frozen_S["expert_ids"].shape[1], objective=kernel)


def train_routed(
    loss: RoutedLoss,
    trainer: LocalTrainer,
    experts_SH: Tensors,
    expert_ids_SH: Tensor,
    router_S: Tensors,
    data: Examples,
    rng: Streams,
) -> Fitted:
    """By two optimizers, as in the paper: that of the settings for the experts, plain SGD for the router."""
    experts = trainer.group(experts_SH, loss, data)
    router = Group(router_S, loss, data, Sgd(loss.router_rate), augmentation=trainer.settings.augmentation)
    return trainer.fit({"experts": experts, "router": router}, rng, {"expert_ids": expert_ids_SH})


class RoutedSettings(ctypes.Structure):
    """`struct RoutedSettings` in routed_objective.h."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_int64) for name in ("first_weight", "first_bias", "second_weight", "second_bias")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_features", "hidden", "size", "over_sent")),
        ("rate", ctypes.c_double),
    ]


@dataclass(frozen=True)
class RoutedKernel:
    """Implements `training.kernel_spec.KernelObjective`."""

    shapes_of_router: Shapes  # in the order of names
    rate: float
    over_sent: bool
    expert_ids_SH: Tensor
    embedding_SNF: Tensor
    shape_of_labels: tuple[int, ...]  # (S, N)

    function: ClassVar[str] = "fedmoe_train_routed"
    other_groups: ClassVar[frozenset[str]] = frozenset({"router"})
    shapes: ClassVar[Shapes] = {}

    def bind(self, _starts: Mapping[str, int], flat: Mapping[str, Tensor]) -> Objective:
        sizes = {name: math.prod(shape) for name, shape in self.shapes_of_router.items()}
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name], total = total, total + size
        num_experts, hidden = self.shapes_of_router["second.weight"]
        num_features = self.shapes_of_router["first.weight"][1]
        self._check(flat["router"], num_experts, num_features, total)
        places = (starts[name] for name in ("first.weight", "first.bias", "second.weight", "second.bias"))
        settings = RoutedSettings(*places, num_experts, num_features, hidden, total, self.over_sent, self.rate)
        inputs = (self.expert_ids_SH.contiguous(), self.embedding_SNF.contiguous(), flat["router"])
        return Objective(self.function, settings, inputs)

    def _check(self, router_SP: Tensor, num_experts: int, num_features: int, size: int) -> None:
        clients, held = self.shape_of_labels[0], self.expert_ids_SH.shape[1]
        check_tensor("the router", router_SP, (clients, size))
        check_tensor("the embeddings", self.embedding_SNF, (*self.shape_of_labels, num_features))
        check_tensor("expert_ids", self.expert_ids_SH, (clients, held), torch.int64)
        lowest, highest = (int(k) for k in self.expert_ids_SH.aminmax()) if held and clients else (0, 0)
        if lowest < 0 or highest >= num_experts:
            raise MessageError(
                f"expert_ids reach from {lowest} to {highest}, but there are {num_experts} experts: "
                "the message is of another model."
            )
