"""Whole epochs of plain cross-entropy in the native kernels: no Python between a client's batches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.errors import DataError
from fedmoe.native.kernel import Kernel, OptimizerSettings
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.flat import Layout
from fedmoe.training.optimizers import Adam, Optimizer
from fedmoe.vocabulary import Tensors

if TYPE_CHECKING:
    from fedmoe.training.fit import Group


class NativeEpochs(NamedTuple):
    """One group of a cohort, as the kernels read and write it."""

    kernel: Kernel
    images_SN: Tensor
    y_SN: Tensor
    flat_SP: Tensor
    offsets: NDArray[np.int64]
    slots: list[Tensor]
    optimizer: OptimizerSettings

    def run(self, s: int, batches: Sequence[Tensor], steps_before: int) -> float:
        """One client's steps over `batches`; the sum of their mean losses."""
        slots = [slot[s] for slot in self.slots]
        data, flat = (self.images_SN[s], self.y_SN[s]), self.flat_SP[s]
        return self.kernel.train(*data, batches, flat, self.offsets, slots, steps_before, self.optimizer)


def native_epochs(
    groups: Mapping[str, "Group"],
    layouts: Mapping[str, Layout],
    flat: Mapping[str, Tensor],
    slots: Mapping[str, Tensors],
) -> NativeEpochs | None:
    """None where something besides one network's cross-entropy is trained: then each step asks the kernels."""
    name, group = next(iter(groups.items()))
    plain = isinstance(group.loss, ClassifierLoss) and not (group.batch_term or group.noise or group.augmentation)
    if len(groups) > 1 or not plain:
        return None
    assert isinstance(group.loss, ClassifierLoss)
    kernel = group.loss.network.native
    if kernel is None:
        return None
    _refuse_strange_labels(group.data.y, kernel.program.num_outputs)
    starts = dict(zip(layouts[name].names, np.cumsum([0, *layouts[name].sizes[:-1]]).tolist(), strict=True))
    offsets = np.array([starts[param] for param in kernel.program.params], dtype=np.int64)
    own = list(slots[name].values())
    return NativeEpochs(
        kernel,
        kernel.images(group.data.x),
        group.data.y.contiguous(),
        flat[name],
        offsets,
        own,
        _settings(group.optimizer),
    )


def _settings(optimizer: Optimizer) -> OptimizerSettings:
    if isinstance(optimizer, Adam):
        return OptimizerSettings(
            optimizer.learning_rate, 0.0, optimizer.beta1, optimizer.beta2, optimizer.epsilon, adam=True
        )
    return OptimizerSettings(optimizer.learning_rate, optimizer.momentum, adam=False)


def _refuse_strange_labels(y_SN: Tensor, num_classes: int) -> None:
    if y_SN.numel() and not 0 <= int(y_SN.min()) <= int(y_SN.max()) < num_classes:
        raise DataError(
            f"labels reach from {int(y_SN.min())} to {int(y_SN.max())}, but the model has {num_classes} outputs. "
            "Give it as many outputs as there are classes."
        )
