"""Classes that count more: the loss of an example times the weight of its class. The mean is over examples."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedmoe.core_types import Examples, Tree
from fedmoe.errors import ConfigError
from fedmoe.setting_types import PositiveFloat
from fedmoe.training.batch import Batch, Loss, Trainable
from fedmoe.training.devices import to_device
from fedmoe.training.kernel_spec import KernelSpec

# By number, by name, or such that every class counts alike in all.
ClassWeights = Literal["balanced"] | tuple[PositiveFloat, ...] | dict[str, PositiveFloat]


class ClassWeightedLoss:
    """Any loss, weighted. The native kernels take whole epochs of it where they know it as a classifier's."""

    def __init__(self, loss: Loss, weights: Sequence[float]) -> None:
        self.loss, self.weights_C = loss, torch.tensor(weights)
        self._elsewhere: dict[torch.device, Tensor] = {}  # copies on other devices, each made once

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        return self.loss(trainable, frozen, batch) * self._weights_on(batch.y.device)[batch.y]

    def _weights_on(self, device: torch.device) -> Tensor:
        if device == self.weights_C.device:
            return self.weights_C
        if device not in self._elsewhere:
            self._elsewhere[device] = to_device(self.weights_C, device)
        return self._elsewhere[device]

    def kernel_spec(self, params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str:
        spec_of = getattr(self.loss, "kernel_spec", None)
        spec: KernelSpec | str | None = spec_of and spec_of(params_S, data, frozen_S)
        if isinstance(spec, KernelSpec) and spec.objective is None:
            return spec._replace(class_weight_SC=self.weights_C.expand(len(data.y), -1))
        if isinstance(spec, str):
            return spec
        return f"training.class_weights is set, and {_called(self.loss)} is no classifier's loss to the kernels"


def _called(loss: Loss) -> str:
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))


def balanced_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """n / (C n_c), as scikit-learn has it: the mean over examples is 1; a class without any counts as usual.

    >>> balanced_weights([30, 10, 0])
    (0.666..., 2.0, 1.0)
    """
    present = sum(count > 0 for count in counts)
    return tuple(sum(counts) / (present * count) if count else 1.0 for count in counts)


def explicit_weights(
    given: Sequence[float] | Mapping[str, float], num_classes: int, class_names: Sequence[str]
) -> tuple[float, ...]:
    """One weight per class; classes that a table by name leaves out count 1."""
    if isinstance(given, Mapping):
        names = list(class_names) or [str(label) for label in range(num_classes)]
        for name in given:
            if name not in names:
                known = ", ".join(map(repr, names[:20]))
                raise ConfigError(
                    f"training.class_weights names the class {name!r}, which is not there. Known: {known}."
                )
        return tuple(float(given.get(name, 1.0)) for name in names)
    if len(given) != num_classes:
        raise ConfigError(f"training.class_weights has {len(given)} weights, but there are {num_classes} classes.")
    return tuple(map(float, given))
