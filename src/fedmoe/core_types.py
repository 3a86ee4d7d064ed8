"""The words that every layer uses. Next to no logic.

Shape suffixes: S clients of a cohort, N examples of a client, B examples of a batch.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

ClientId = int
Tensors = dict[str, Tensor]

# A tree is a Tensor, a dict of trees by name, or a NamedTuple of trees. States and messages are trees.
# Spelled Any because Python cannot say "any NamedTuple whose fields are trees".
Tree = Any


class Examples(NamedTuple):
    """Examples of one client (N, ...), or of a cohort (S, N, ...) padded at the end.

    `counts` is () for one client and (S,) for a cohort: how many of the N rows are real.
    `extra` holds further tensors per example: side information, such as the angle of an image, that training may use
    and prediction may not; or cached outputs of frozen parts.
    """

    x: Tensor
    y: Tensor
    counts: Tensor
    extra: Tensors

    def __repr__(self) -> str:
        """Shapes alone: rows are private, and end up in logs where they are shown."""
        beside = f", extra {', '.join(self.extra)}" if self.extra else ""
        return f"<Examples: x {tuple(self.x.shape)} {self.x.dtype}, y {tuple(self.y.shape)}{beside}>"


class ClientData:
    """What client code may see: training and validation examples, of one client or of a cohort.

    Code whose result leaves the client is handed the opted-in records only; personalisation is handed all of them.
    `inputs` are what a client has to choose by, without labels (y is all zeros): its training inputs, or those of a new
    client that has no labels.
    A part may be given as a function, called when the part is first asked for: a round seldom looks at validation data.
    """

    def __init__(
        self,
        train: Examples | Callable[[], Examples],
        validation: Examples | Callable[[], Examples],
        inputs: Callable[[], Examples] | None = None,
    ) -> None:
        self._train, self._validation, self._inputs = train, validation, inputs

    @cached_property
    def train(self) -> Examples:
        return self._train() if callable(self._train) else self._train

    @cached_property
    def validation(self) -> Examples:
        return self._validation() if callable(self._validation) else self._validation

    @cached_property
    def inputs(self) -> Examples:
        return self._inputs() if self._inputs else without_labels(self.train)

    def __repr__(self) -> str:
        """Of parts that are there already: nothing is made to be shown."""
        made = {
            "train": vars(self).get("train", self._train),
            "validation": vars(self).get("validation", self._validation),
        }
        parts = (f"{name} {'not made yet' if callable(part) else tuple(part.x.shape)}" for name, part in made.items())
        return f"<ClientData: {', '.join(parts)}>"

    def map(self, change: Callable[[Examples], Examples]) -> "ClientData":
        return ClientData(change(self.train), change(self.validation), lambda: change(self.inputs))


def without_labels(rows: Examples) -> Examples:
    """The same with zeros for labels, which are not looked at."""
    leading = rows.counts.dim() + 1
    return rows._replace(y=torch.zeros(rows.x.shape[:leading], dtype=torch.int64))
