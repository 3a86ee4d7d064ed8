"""A data set as it is stored: compact tensors, and the way to turn them into what a model reads."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from fedmoe.core_types import Tensors


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Table:
    """Rows of one part of a data set. `x` may be kept as bytes; `fields` are further columns, such as the writer."""

    x: Tensor
    y: Tensor
    fields: Tensors = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Table: x {tuple(self.x.shape)} {self.x.dtype}; {', '.join(self.columns)}>"

    def column(self, name: str) -> Tensor:
        return self.y if name == "label" else self.fields[name]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("label", *self.fields)


@dataclass(frozen=True)
class Dataset:
    """Training and test rows; `prepare` maps stored rows to model inputs (for images: float32 in [-1, 1]).

    A data set without class names is a regression: its `y` are float32.
    """

    name: str
    train: Table
    test: Table
    class_names: tuple[str, ...]
    prepare: Callable[[Tensor], Tensor] = unchanged
    lexicon: tuple[str, ...] | None = None  # of text: the word of each stored id, sorted; id 0 is padding
    vocabulary_size: int | None = None  # how many ids a model meets after `prepare`; None until it is limited

    def __repr__(self) -> str:
        rows = f"{len(self.train.y)} training and {len(self.test.y)} test rows"
        return f"<Dataset {self.name}: {rows}; {self.num_classes or 'no'} classes>"

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.prepare(self.train.x[:1]).shape[1:])
