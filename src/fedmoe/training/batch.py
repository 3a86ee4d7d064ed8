"""What a loss is given, and what a loss is."""

from collections.abc import Callable

from torch import Tensor

from fedmoe.core_types import Tensors, Tree


class Batch:
    """What a loss sees of one client: examples and, from `Examples.extra` and `Group.noise`, tensors beside them."""

    __slots__ = ("extra", "training", "x", "y")

    def __init__(self, x: Tensor, y: Tensor, extra: Tensors, *, training: bool = False) -> None:
        self.x, self.y, self.extra, self.training = x, y, extra, training

    def __len__(self) -> int:
        return len(self.y)


Trainable = dict[str, Tree]  # the parameters of every group, by the group's name
Loss = Callable[[Trainable, Tree, Batch], Tensor]  # losses_B = loss(trainable, frozen, batch)
BatchTerm = Callable[[Trainable, Tree, Batch, Tensor], Tensor]  # of a whole batch; the last says which rows are real
