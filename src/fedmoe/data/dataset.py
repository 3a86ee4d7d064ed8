"""A data set as it is stored: compact tensors, and the way to turn them into what a model reads."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from fedmoe.vocabulary import Tensors


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Table:
    """Rows of one part of a data set. `x` may be kept as bytes; `fields` are further columns, such as the writer."""

    x: Tensor
    y: Tensor
    fields: Tensors = field(default_factory=dict)

    def column(self, name: str) -> Tensor:
        return self.y if name == "label" else self.fields[name]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("label", *self.fields)


@dataclass(frozen=True)
class Dataset:
    """Training and test rows; `prepare` maps stored rows to model inputs (for images: float32 in [-1, 1])."""

    name: str
    train: Table
    test: Table
    class_names: tuple[str, ...]
    prepare: Callable[[Tensor], Tensor] = unchanged

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.prepare(self.train.x[:1]).shape[1:])
