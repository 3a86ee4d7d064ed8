"""Whole epochs of the plain losses in the native kernels: no Python between a client's batches."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmoe.core_types import Tensors, Tree
from fedmoe.errors import DataError
from fedmoe.native.kernel import Kernel
from fedmoe.native.trainer import FedMixObjective, OptimizerSettings, Rows, Steps, Trainer
from fedmoe.streams import Streams
from fedmoe.training.flat import Layout
from fedmoe.training.kernel_spec import KernelLoss
from fedmoe.training.optimizers import Adam, Optimizer

if TYPE_CHECKING:
    from fedmoe.training.fit import Group


class NativeEpochs(NamedTuple):
    """One group of a cohort, as the kernels read and write it."""

    trainer: Trainer
    rows: Rows
    counts: list[int]
    batch_size: int
    generators: list[torch.Generator]

    def run(self, clients: Sequence[int], steps_S: Sequence[int], steps_before_S: Sequence[int]) -> list[float]:
        """The next steps of some clients: an epoch, or all steps of a schedule that counts them. Their losses' sums."""
        size = self.batch_size
        tasks = [
            Steps(
                s,
                shuffled(self.generators[s], self.counts[s], size, steps_S[s]),
                ends_of_batches(self.counts[s], size, steps_S[s]),
                steps_before_S[s],
            )
            for s in clients
        ]
        return self.trainer.run(self.rows, tasks)


def native_epochs(
    groups: Mapping[str, "Group"],
    layouts: Mapping[str, Layout],
    flat: Mapping[str, Tensor],
    slots: Mapping[str, Tensors],
    batch_size: int,
    rng: Streams,
    frozen: Tree,
) -> NativeEpochs | None:
    """None where something besides a loss that the kernels know is trained: then each step asks them."""
    name, group = next(iter(groups.items()))
    plan = group.loss.kernel_spec(group.params, group.data, frozen) if isinstance(group.loss, KernelLoss) else None
    if plan is None or any(network.native is None for network in plan.networks.values()):
        return None
    known = {name, plan.usage[0]} if plan.usage else {name}
    if groups.keys() != known or group.batch_term or group.noise or group.augmentation:
        return None
    kernels = tuple((part, network.native) for part, network in plan.networks.items() if network.native)
    data, first, layout = group.data, kernels[0][1], layouts[name]
    _refuse_strange(data.y, first.program.num_outputs, "labels", "the model has {} outputs")
    holding, damping, held = plan.holding, 1.0, None
    if holding:
        held = holding.expert_ids_SH.shape[1]
    if holding and plan.usage:
        usage, damping = plan.usage
        holding = holding._replace(usage_SK=flat[usage])
    elif holding:
        _refuse_strange(holding.condition_SN, group.params["posterior"].shape[1], "values", "q has {} rows")
    inputs = first.images(data.x), data.y.contiguous()
    given_SN = None  # after the labels were looked at
    if plan.given_SNC is not None:
        given_SN = plan.given_SNC.gather(-1, data.y.unsqueeze(-1)).squeeze(-1).contiguous()
    return NativeEpochs(
        trainer=_trainer(kernels, layout.names, tuple(layout.sizes), group.optimizer, held, damping),
        rows=Rows(*inputs, flat[name], list(slots[name].values()), given_SN, holding),
        counts=data.counts.tolist(),
        batch_size=batch_size,
        generators=rng.generators("batches"),
    )


@lru_cache(maxsize=16)
def _trainer(
    kernels: tuple[tuple[str, Kernel], ...],
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    optimizer: Optimizer,
    experts_held: int | None,
    damping: float,
) -> Trainer:
    starts = dict(zip(names, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    offsets = [
        np.array([starts[part + param] for param in kernel.program.params], dtype=np.int64) for part, kernel in kernels
    ]
    if experts_held is None:
        return Trainer([kernel for _, kernel in kernels], offsets, _settings(optimizer))
    (expert,) = (kernel for _, kernel in kernels)
    of_experts = [offsets[0] + h * expert.sizes for h in range(experts_held)]
    bound = _bound(starts, dict(zip(names, sizes, strict=True)), damping)
    return Trainer([expert] * experts_held, of_experts, _settings(optimizer), bound)


def _bound(starts: Mapping[str, int], sizes: Mapping[str, int], damping: float) -> FedMixObjective:
    """Without phi every client has a q of its own: one row."""
    num_experts = sizes["gate/bias"]
    num_values, num_features = sizes.get("posterior", num_experts) // num_experts, sizes["gate/weight"] // num_experts
    places = starts.get("posterior", -1), starts["gate/weight"], starts["gate/bias"]
    return FedMixObjective(*places, num_values, num_experts, num_features, damping)


def shuffled(generator: torch.Generator, count: int, batch_size: int, steps: int) -> Tensor:
    """The rows of `steps` batches one after another: the batches of `fit.shuffled`."""
    epochs = -(-steps // -(-count // batch_size))
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return orders[0] if epochs == 1 else torch.cat(orders)


@lru_cache(maxsize=1024)
def ends_of_batches(count: int, batch_size: int, steps: int) -> Tensor:
    """Where each batch ends in `shuffled`."""
    per_epoch = -(-count // batch_size)
    ends_of_epoch = (torch.arange(1, per_epoch + 1) * batch_size).clamp(max=count)
    starts = torch.arange(-(-steps // per_epoch))[:, None] * count
    return (starts + ends_of_epoch).flatten()[:steps]


def _settings(optimizer: Optimizer) -> OptimizerSettings:
    if isinstance(optimizer, Adam):
        return OptimizerSettings(
            optimizer.learning_rate, 0.0, optimizer.beta1, optimizer.beta2, optimizer.epsilon, adam=True
        )
    return OptimizerSettings(optimizer.learning_rate, optimizer.momentum, adam=False)


def _refuse_strange(values_SN: Tensor, count: int, what: str, room: str) -> None:
    """The kernels do not look."""
    lowest, highest = (int(value) for value in values_SN.aminmax()) if values_SN.numel() else (0, 0)
    if lowest < 0 or highest >= count:
        raise DataError(
            f"{what} reach from {lowest} to {highest}, but {room.format(count)}. Give it as many as there are {what}."
        )
