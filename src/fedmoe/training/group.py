"""What is trained, on what and for how long: the words in which an algorithm tells the local trainer.

Shape suffixes: S clients of a cohort.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.training.augment import Augmentation
from fedmoe.training.batch import BatchTerm, Loss, Trainable
from fedmoe.training.corrections import Proximal
from fedmoe.training.devices import examples_to, to_device
from fedmoe.training.inference import clients_of
from fedmoe.training.optimizers import Optimizer
from fedmoe.training.rates import Rates


class Group(NamedTuple):
    """Parameters that follow one loss on one set of examples.

    All groups take their gradients at the same point and then step together; groups with equal data see equal batches.
    """

    params: Tree  # (nested) dict, each leaf (S, ...)
    loss: Loss
    data: Examples
    optimizer: Optimizer
    batch_term: BatchTerm | None = None
    noise: Callable[[torch.Generator, int], Tensors] | None = None  # per-example draws, added to batch.extra
    augmentation: Augmentation | None = None  # changes x of every training batch
    proximal: Proximal | None = None  # a pull of the parameters towards given ones: FedProx, Ditto
    gradient_offset: Tree | None = None  # of the structure of `params`, added to every gradient: SCAFFOLD
    trained_names: frozenset[str] | None = None  # parameters that move, the others stay: FedRep; None: all move
    rates: Rates | None = None  # how the optimizer's learning rate changes; None: it does not
    max_gradient_norm: float | None = None  # a client's longer gradient is scaled down to it, at every step


class Schedule(NamedTuple):
    """How long: passes over the first group's data, or a number of steps (then `epochs` is not read)."""

    batch_size: int
    epochs: int = 1
    steps: int | None = None

    @property
    def passes(self) -> int:
        """How often the steps of `_steps_per_epoch` are taken: a number of steps is one pass of so many."""
        return 1 if self.steps is not None else self.epochs


class Fitted(NamedTuple):
    """`loss_S`: mean training loss of the last epoch (0 for a client without examples); `epochs_S`: epochs trained.

    The loss is that of the first group with its `batch_term`; `proximal` and `gradient_offset` are not part of it, so
    that methods with and without them can be compared.
    """

    params: Trainable
    loss_S: Tensor
    epochs_S: Tensor


def of_one_client(group: Group, s: int) -> Group:
    def row(tree: Tree) -> Tree:
        return trees.tree_map(lambda leaf: leaf[s : s + 1], tree)

    return group._replace(
        params=row(group.params),
        data=rows_of_one(group.data, s),
        proximal=group.proximal and group.proximal._replace(towards_S=row(group.proximal.towards_S)),
        gradient_offset=None if group.gradient_offset is None else row(group.gradient_offset),
    )


def on_device(group: Group, device: torch.device) -> Group:
    return group._replace(
        params=to_device(group.params, device),
        data=examples_to(group.data, device),
        proximal=group.proximal and group.proximal._replace(towards_S=to_device(group.proximal.towards_S, device)),
        gradient_offset=None if group.gradient_offset is None else to_device(group.gradient_offset, device),
    )


def rows_of_one(examples: Examples, s: int) -> Examples:
    one = clients_of(examples)[s] if len(examples.counts) > 1 else None
    return examples if one is None else trees.tree_map(lambda leaf: leaf[None], one)
