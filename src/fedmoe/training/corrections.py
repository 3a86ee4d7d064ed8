"""What is done to the gradient of a group's loss: a proximal pull and a constant added, zero where nothing moves, and a
limit to its norm.

Shape suffixes: S clients of a cohort, R clients that take this step, P parameters of a group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import Tree
from fedmoe.errors import MessageError
from fedmoe.training.devices import to_device
from fedmoe.training.flat import Layout

NORM_EPSILON = 1e-6  # of clip_grad_norm_; in native/training.h too


class Proximal(NamedTuple):
    """The term strength / 2 |w - towards|^2 of FedProx (Li et al. 2020) and Ditto (Li et al. 2021)."""

    towards_S: Tree  # of the structure of the parameters, a row per client
    strength: float


class Corrections(NamedTuple):
    """As rows of the flat parameters; None for none."""

    anchor_SP: Tensor | None = None
    strength: float = 0.0
    offset_SP: Tensor | None = None
    untrained_P: Tensor | None = None  # bool: parameters that stay as they are
    max_norm: float | None = None  # of a client's whole gradient, all else done

    @classmethod
    def of(
        cls,
        proximal: Proximal | None,
        gradient_offset: Tree | None,
        trained_names: frozenset[str] | None,
        max_norm: float | None,
        layout: Layout,
        flat_SP: Tensor,
    ) -> "Corrections":
        return cls(
            proximal and _packed(proximal.towards_S, layout, flat_SP, "the weights of the proximal term"),
            proximal.strength if proximal else 0.0,
            None if gradient_offset is None else _packed(gradient_offset, layout, flat_SP, "the gradient offset"),
            None if trained_names is None else to_device(_untrained(trained_names, layout), flat_SP.device),
            max_norm,
        )

    def apply(self, grad_RP: Tensor, point_RP: Tensor, rows: list[int] | slice | Tensor) -> None:
        """In place. `point_RP` are the parameters at which the gradient was taken."""
        if self.anchor_SP is not None:
            grad_RP.add_(point_RP - self.anchor_SP[rows], alpha=self.strength)
        if self.offset_SP is not None:
            grad_RP.add_(self.offset_SP[rows])
        if self.untrained_P is not None:  # no optimizer moves a weight whose gradient was always zero
            grad_RP.masked_fill_(self.untrained_P, 0)
        if self.max_norm is not None:
            clip_by_norm(grad_RP, self.max_norm)


def clip_by_norm(grad_RP: Tensor, max_norm: float) -> None:
    """In place, each client by itself, as `torch.nn.utils.clip_grad_norm_` does."""
    norm_R1 = torch.linalg.vector_norm(grad_RP, dim=1, keepdim=True)
    grad_RP.mul_((max_norm / (norm_R1 + NORM_EPSILON)).clamp_(max=1.0))


def _untrained(trained_names: frozenset[str], layout: Layout) -> Tensor:
    unknown = trained_names - set(layout.names)
    if unknown or not trained_names:
        wrong = f"no parameter is named {min(unknown)!r}" if unknown else "trained_names is empty"
        raise MessageError(f"{wrong}. Name at least one parameter to train, out of {', '.join(layout.names)}.")
    stays = torch.tensor([name not in trained_names for name in layout.names], dtype=torch.bool)
    return stays.repeat_interleave(torch.tensor(layout.sizes))


def _packed(tree_S: Tree, layout: Layout, flat_SP: Tensor, what: str) -> Tensor:
    other = Layout.of(tree_S)
    if other != layout:
        named, expected = (dict(zip(one.names, one.shapes, strict=True)) for one in (other, layout))
        name = next(name for name in sorted(named.keys() | expected.keys()) if named.get(name) != expected.get(name))
        raise MessageError(
            f"{what} and the trained weights differ in {name!r}: shape {named.get(name)} there, "
            f"{expected.get(name)} here. Give both the same structure."
        )
    rows_SP = layout.pack(tree_S)
    if rows_SP.dtype != flat_SP.dtype or rows_SP.shape != flat_SP.shape:
        raise MessageError(
            f"{what} are {rows_SP.dtype} for {len(rows_SP)} clients, but the trained weights are {flat_SP.dtype} for "
            f"{len(flat_SP)} clients."
        )
    return rows_SP
