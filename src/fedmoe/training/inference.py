"""Evaluate a pure function on every example of a cohort, without gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedmoe import trees
from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.training.backends import Backend
from fedmoe.training.batch import Batch
from fedmoe.training.devices import computing_on, examples_to, to_device, to_host

# Large enough to keep the kernels busy, small enough that activations of a convolution stay in cache.
CHUNK = 250


PerExample = Callable[[Any, Batch], Tensor]


def per_example(
    function: PerExample, tree_S: Tree, examples: Examples, backend: Backend, device: torch.device | None = None
) -> Tensor:
    """``function(tree, batch) -> (B, ...)`` for every client and example: (S, N, ...); rows of padding hold zeros.

    With a `device` all goes there, and the result comes back; without, it is computed where the examples are.
    """
    if device is not None and device.type != "cpu":
        there = _batched(function, to_device(tree_S, device), examples_to(examples, device))
        result: Tensor = to_host(there)
        return result
    if backend != "sequential":
        return _batched(function, tree_S, examples)
    rows = [_one_client(function, trees.pick(tree_S, s), one) for s, one in enumerate(clients_of(examples))]
    return pad_rows(rows, examples.y.shape[1])


def clients_of(examples: Examples) -> list[Examples]:
    """Each client's own rows, padding cut off."""
    cut = []
    for s, count in enumerate(examples.counts.tolist()):
        extra = {name: tensor[s, :count] for name, tensor in examples.extra.items()}
        cut.append(Examples(examples.x[s, :count], examples.y[s, :count], examples.counts[s], extra))
    return cut


def pad_rows(rows: list[Tensor], length: int) -> Tensor:
    """Stack ragged tensors (n_s, ...) to (S, length, ...), zeros at the end."""
    if all(len(row) == length for row in rows):
        return torch.stack(rows)
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _one_client(function: PerExample, tree: Tree, examples: Examples) -> Tensor:
    with torch.no_grad():
        starts = range(0, max(len(examples.y), 1), CHUNK)
        return torch.cat([function(tree, _slice(examples, start)) for start in starts])


def _slice(examples: Examples, start: int) -> Batch:
    window = slice(start, start + CHUNK)
    extra = {name: tensor[window] for name, tensor in examples.extra.items()}
    return Batch(examples.x[window], examples.y[window], extra)


def _batched(function: PerExample, tree_S: Tree, examples: Examples) -> Tensor:
    def one(tree: Tree, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        return function(tree, Batch(x, y, extra))

    device = examples.y.device
    with torch.no_grad(), computing_on(device):
        outputs: Tensor = vmap(one)(tree_S, examples.x, examples.y, examples.extra)
    present: Tensor = to_device(torch.arange(examples.y.shape[1]) < examples.counts[:, None], device)
    return outputs * present.view(*present.shape, *[1] * (outputs.dim() - 2))
