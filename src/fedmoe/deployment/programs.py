"""A personal model as a program that runs without fedmoe: `torch.export`, and from that ONNX.

A prediction may branch on the client's own state: a client without data of its own predicts otherwise. A program has no
such branches, so they are decided once, by the state that the model holds: `FixedBranches`.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.models.static_shapes import static_shapes

READS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)


class Untraceable(Exception):  # noqa: N818 (the reason why there is no program, which an export goes on without)
    """A model that cannot be written down as a program."""


class Recording(TorchFunctionMode):
    """Keeps every number that Python code reads out of a tensor, and refuses those that depend on an input."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.read: list[Any] = []
        self._of_inputs = {id(tensor): tensor for tensor in inputs}  # held, so that no other tensor gets the same id

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        depends_on_inputs = any(id(tensor) in self._of_inputs for tensor in _tensors((args, kwargs)))
        if func in READS:
            if depends_on_inputs:
                raise Untraceable("its prediction branches on the values of its inputs, which a program cannot")
            self.read.append(result)
        if depends_on_inputs:
            self._of_inputs |= {id(tensor): tensor for tensor in _tensors(result)}
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for child in tree:
            yield from _tensors(child)


class Replaying(TorchFunctionMode):
    """Gives the same numbers again, where a trace has none."""

    def __init__(self, read: list[Any]) -> None:
        super().__init__()
        self._next = iter(read)

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self._next) if func in READS else func(*args, **(kwargs or {}))


class FixedBranches(nn.Module):
    """The model as it predicts with the state that it holds now, which decides every branch of the prediction."""

    def __init__(self, model: PersonalModel, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self._read = self._numbers_read(inputs)

    def forward(self, x: Tensor, log_prior: Tensor | None = None) -> Tensor:
        with Replaying(self._read), static_shapes():
            return self.model.unchecked(x, log_prior)

    def _numbers_read(self, inputs: Sequence[Tensor]) -> list[Any]:
        recording = Recording(inputs)
        with torch.no_grad(), recording, static_shapes():
            self.model.unchecked(*inputs)
        return recording.read


def inputs_of(model: PersonalModel, x: Tensor) -> dict[str, Tensor]:
    """What a program of this model takes, by name: the rows, and where its answer adds one a log-prior.

    A copy: an input that is the model's own tensor would stand for it in the whole program, whatever is given later.
    """
    return {"x": x, "log_prior": model.log_prior("own").clone()} if model.adds_prior else {"x": x}


def traced(model: PersonalModel, x: Tensor) -> torch.export.ExportedProgram:
    """For batches of any size; `x` is an example of at least two rows. Raises Untraceable with the reason."""
    inputs = tuple(inputs_of(model, x).values())
    shapes = ({0: torch.export.Dim("batch", min=1)}, None)[: len(inputs)]
    try:
        with torch.no_grad():
            return torch.export.export(FixedBranches(model, inputs), inputs, dynamic_shapes=shapes)
    except Untraceable:
        raise
    except Exception as error:  # whatever torch.export finds in a module of the user's
        raise Untraceable(first_line(error)) from error


def without_traces(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Forget from which lines of which files the program was made: it is given to others."""
    for node in program.graph.nodes:
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack", "from_node", "torch_fn"):
            node.meta.pop(key, None)
    return program


def to_onnx(program: torch.export.ExportedProgram, path: Path, inputs: Sequence[str], answer: str) -> None:
    """`inputs` and `answer` name what goes in and comes out. Raises Untraceable for what ONNX has no operator for."""
    try:
        with warnings.catch_warnings(), quiet("torch.onnx"):
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's exporter still calls what PyTorch has deprecated
            plain = program.run_decompositions({torch.ops.aten.cdist.default: euclidean_distances})
            made = torch.onnx.export(plain, dynamo=True, verbose=False, input_names=list(inputs), output_names=[answer])
            assert made is not None
            made.save(path, external_data=False)
    except ImportError as error:
        raise Untraceable(f"{error.name} is not installed: pip install 'fedmoe[export]'") from error
    except Exception as error:  # whatever the exporter meets
        raise Untraceable(last_line(error)) from error


def euclidean_distances(a_BF: Tensor, b_NF: Tensor, p: float = 2.0, _mode: int | None = None) -> Tensor:
    """What ONNX has for `torch.cdist`: no operator, but sums of squares."""
    if p != 2.0:
        raise Untraceable(f"torch.cdist with p={p} has no form in ONNX")
    return (a_BF.unsqueeze(-2) - b_NF.unsqueeze(-3)).square().sum(-1).sqrt()


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Only errors of this logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def last_line(error: BaseException) -> str:
    """PyTorch says first what it did and last what went wrong."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
