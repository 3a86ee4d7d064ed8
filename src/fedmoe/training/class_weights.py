"""Classes that count more: the loss of an example times the weight of its class. The mean is over examples."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedmoe.core_types import Tree
from fedmoe.errors import ConfigError
from fedmoe.setting_types import PositiveFloat
from fedmoe.training.batch import Batch, Loss, Trainable
from fedmoe.training.devices import to_device

# By number, by name, or such that every class counts alike in all.
ClassWeights = Literal["balanced"] | tuple[PositiveFloat, ...] | dict[str, PositiveFloat]


class ClassWeightedLoss:
    """Any loss, weighted; the native kernels ask it at each step."""

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

    def kernel_spec(self, *_: Any) -> str:
        return "training.class_weights is set, which the kernels do not know"


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
