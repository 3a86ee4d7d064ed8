"""Whole epochs of the plain losses in the native kernels: no Python between a client's batches."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmoe.errors import DataError
from fedmoe.models.network import Network
from fedmoe.native.kernel import Kernel
from fedmoe.native.trainer import OptimizerSettings, Rows, Steps, Trainer
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss, MixtureLoss
from fedmoe.training.flat import Layout
from fedmoe.training.optimizers import Adam, Optimizer
from fedmoe.vocabulary import Tensors

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
) -> NativeEpochs | None:
    """None where something besides a plain loss of native networks is trained: then each step asks the kernels."""
    name, group = next(iter(groups.items()))
    networks = _networks(group)
    if len(groups) > 1 or not networks or group.batch_term or group.noise or group.augmentation:
        return None
    if any(network.native is None for network in networks.values()):
        return None
    kernels = {part: network.native for part, network in networks.items() if network.native}
    first = next(iter(kernels.values()))
    _refuse_strange_labels(group.data.y, first.program.num_outputs)
    data = group.data
    rows = Rows(first.images(data.x), data.y.contiguous(), _given(group), flat[name], list(slots[name].values()))
    return NativeEpochs(
        trainer=_trainer(tuple(kernels.items()), layouts[name].names, tuple(layouts[name].sizes), group.optimizer),
        rows=rows,
        counts=data.counts.tolist(),
        batch_size=batch_size,
        generators=rng.generators("batches"),
    )


@lru_cache(maxsize=16)
def _trainer(
    kernels: tuple[tuple[str, Kernel], ...], names: tuple[str, ...], sizes: tuple[int, ...], optimizer: Optimizer
) -> Trainer:
    starts = dict(zip(names, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    offsets = [
        np.array([starts[part + param] for param in kernel.program.params], dtype=np.int64) for part, kernel in kernels
    ]
    return Trainer([kernel for _, kernel in kernels], offsets, _settings(optimizer))


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


def _networks(group: "Group") -> dict[str, Network]:
    """Which network reads which part of the group, in the order of the kernels."""
    loss = group.loss
    if isinstance(loss, ClassifierLoss):
        return {"": loss.network}
    if isinstance(loss, MixtureLoss) and loss.second in group.params:
        return {f"{loss.first}/": loss.expert, "gate/": loss.gate, f"{loss.second}/": loss.expert}
    if isinstance(loss, MixtureLoss) and loss.second in group.data.extra:
        return {f"{loss.first}/": loss.expert, "gate/": loss.gate}
    return {}


def _given(group: "Group") -> Tensor | None:
    """The frozen expert's log-probability at each label, where there is one."""
    if not isinstance(group.loss, MixtureLoss) or group.loss.second in group.params:
        return None
    answers_SNC = group.data.extra[group.loss.second]
    return answers_SNC.gather(-1, group.data.y.unsqueeze(-1)).squeeze(-1).contiguous()


def _settings(optimizer: Optimizer) -> OptimizerSettings:
    if isinstance(optimizer, Adam):
        return OptimizerSettings(
            optimizer.learning_rate, 0.0, optimizer.beta1, optimizer.beta2, optimizer.epsilon, adam=True
        )
    return OptimizerSettings(optimizer.learning_rate, optimizer.momentum, adam=False)


def _refuse_strange_labels(y_SN: Tensor, num_classes: int) -> None:
    lowest, highest = (int(label) for label in y_SN.aminmax()) if y_SN.numel() else (0, 0)
    if lowest < 0 or highest >= num_classes:
        raise DataError(
            f"labels reach from {lowest} to {highest}, but the model has {num_classes} outputs. "
            "Give it as many outputs as there are classes."
        )
