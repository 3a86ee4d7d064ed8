"""Named parameters as one flat vector per client, and back, without copies on the way back."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Tree


class Layout(NamedTuple):
    """Where each named tensor of a (nested) dict lies in the vector of one client, in the order of names."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: list[int]

    @classmethod
    def of(cls, params_S: Tree) -> "Layout":
        named = dict(sorted(trees.to_named(params_S).items()))
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in named.values())
        return cls(tuple(named), shapes, [math.prod(shape) for shape in shapes])

    def pack(self, params_S: Tree) -> Tensor:
        """(S, P), a copy: what is trained is never the sender's tensor."""
        named = trees.to_named(params_S)
        return torch.cat([named[name].reshape(len(named[name]), -1) for name in self.names], dim=1)

    def unpack(self, flat: Tensor) -> Tree:
        """Views of the vector (P,) of one client, or of the rows (S, P) of a cohort."""
        parts = flat.split(self.sizes, dim=-1)
        lead = flat.shape[:-1]
        views = (part.view((*lead, *shape)) for part, shape in zip(parts, self.shapes, strict=True))
        return trees.nested(dict(zip(self.names, views, strict=True)))
