"""Where local training computes: tensors go to a device at the edge of the trainer and come back at its end.

Algorithms, messages and private states stay on the CPU and know nothing of it. Random numbers are drawn on the CPU too,
so that a run on another device draws the same. Everything that crosses passes `to_device` and `to_host`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Examples, Tree
from fedmoe.errors import ConfigError

DeviceName = Literal["cpu", "cuda", "mps"]
CPU = torch.device("cpu")


def available(name: DeviceName) -> bool:
    if name == "cpu":
        return True
    return torch.cuda.is_available() if name == "cuda" else torch.backends.mps.is_available()


def choose_device(wanted: DeviceName | Literal["auto"]) -> DeviceName:
    """The one that is asked for, if it is there; `auto` is the first of cuda, mps and cpu that is."""
    if wanted == "auto":
        return "cuda" if available("cuda") else "mps" if available("mps") else "cpu"
    if not available(wanted):
        there = [name for name in ("cuda", "mps") if available(name)]
        raise ConfigError(
            f"engine.device={wanted!r}, but PyTorch finds no such device here (it finds "
            f"{', '.join(there) or 'none but the cpu'}). Set engine.device = 'auto', or install PyTorch for it."
        )
    return wanted


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Tensors that a loss makes itself (`torch.arange(…)`) are made where its inputs are."""
    return nullcontext() if device.type == "cpu" else device


def to_device(tree: Tree, device: torch.device) -> Tree:
    return trees.tree_map(lambda leaf: leaf if leaf.device == device else leaf.to(device), tree)


def to_host(tree: Tree) -> Tree:
    return to_device(tree, CPU)


def examples_to(examples: Examples, device: torch.device) -> Examples:
    """All but the counts, which say what to do and not what to compute with."""
    if examples.x.device == device:
        return examples
    x, y, extra = to_device((examples.x, examples.y, examples.extra), device)
    return Examples(x, y, examples.counts, extra)


def index_on(device: torch.device, rows: list[int]) -> Tensor:
    """Row numbers where the rows are: a list would be copied there without a word."""
    index: Tensor = to_device(torch.tensor(rows), device)
    return index


def predicting_on(device: torch.device, predict: Callable[..., Tensor], *states: Any) -> Callable[[Tensor], Tensor]:
    """``predict(*states, x)`` as a function of x: states go there once, x each time, and the prediction comes back."""
    if device.type == "cpu":
        return lambda x: predict(*states, x)
    there = [None if state is None else to_device(state, device) for state in states]

    def predicted(x: Tensor) -> Tensor:
        with computing_on(device):
            found: Tensor = to_host(predict(*there, to_device(x, device)))
        return found

    return predicted
