"""A personal model as a program that runs without fedmoe: `torch.export`, and from that ONNX.

A prediction may branch on the client's own state: a client without data of its own predicts otherwise. A program has no
such branches, so they are decided once, by the state that the model holds: `FixedBranches`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedmoe.evaluation.personal_model import PersonalModel

READS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)


class Untraceable(Exception):  # noqa: N818 (the reason why there is no program, which an export goes on without)
    """A model that cannot be written down as a program."""


class Recording(TorchFunctionMode):
    """Keeps every number that Python code reads out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in READS:
            self.read.append(result)
        return result


class Replaying(TorchFunctionMode):
    """Gives the same numbers again, where a trace has none."""

    def __init__(self, read: list[Any]) -> None:
        super().__init__()
        self._next = iter(read)

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self._next) if func in READS else func(*args, **(kwargs or {}))


class FixedBranches(nn.Module):
    """The model as it predicts with the state that it holds now, which decides every branch of the prediction."""

    def __init__(self, model: PersonalModel, x: Tensor) -> None:
        super().__init__()
        self.model = model
        self._read = self._numbers_read(x)
        if self._read != self._numbers_read(x.flip(0)[:1]):
            raise Untraceable("its prediction branches on the values of x, which a program cannot")

    def forward(self, x: Tensor) -> Tensor:
        with Replaying(self._read):
            probabilities: Tensor = self.model(x)
        return probabilities

    def _numbers_read(self, x: Tensor) -> list[Any]:
        recording = Recording()
        with torch.no_grad(), recording:
            self.model(x)
        return recording.read


def traced(model: PersonalModel, x: Tensor) -> torch.export.ExportedProgram:
    """For batches of any size; `x` is an example of at least two rows. Raises Untraceable with the reason."""
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            return torch.export.export(FixedBranches(model, x), (x,), dynamic_shapes=({0: batch},))
    except Untraceable:
        raise
    except Exception as error:  # whatever torch.export finds in a module of the user's
        raise Untraceable(first_line(error)) from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
