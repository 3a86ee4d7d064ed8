"""What a user gives for one client: arrays, tensors or a torch Dataset, read and checked row by row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedmoe.clients.federation import examples
from fedmoe.core_types import Examples, Tensors
from fedmoe.errors import DataError

Array = Tensor | NDArray[Any]
ExampleArrays = tuple[Array, Array] | tuple[Array, Array, Mapping[str, Array]]  # x (N, ...), y (N,), side info (N,)
ExampleSource = ExampleArrays | Dataset[Any]
OptedOut = bool | Sequence[bool] | Tensor
TaskName = Literal["classification", "regression"]
Collate = Callable[[list[Any]], Any]  # rows of a Dataset -> (x, y) or (x, y, side) of them all, as for a DataLoader


def arrays_of(source: ExampleSource, whose: str, collate: Collate | None, are_sequences: bool) -> ExampleArrays:
    """What was given as (x, y) or (x, y, side), not checked yet. Of sequences x is a list."""
    rows = None
    if isinstance(source, Dataset) and hasattr(source, "__len__"):
        rows = [source[row] for row in range(len(source))]
    elif collate is not None and isinstance(source, list):
        rows = source
    if rows is not None:
        source = collate(rows) if collate is not None else _stacked(rows, whose, are_sequences)
    if not (isinstance(source, tuple | list) and len(source) in (2, 3)):
        if is_frame(source):
            raise DataError(f"{whose} is a {type(source).__name__}. Give its columns as (x, y), {WHOLE_TABLE}.")
        if rows is not None:
            raise DataError(f"{whose}: collate returned a {type(source).__name__}. Let it return (x, y) of all rows.")
        raise DataError(f"{whose} is a {type(source).__name__}. Give (x, y) arrays, or a torch Dataset with a length.")
    given: list[Any] = list(source)
    return tuple(one.to_numpy() if is_frame(one) else one for one in given)


def is_frame(given: object) -> bool:
    """A frame or a series of pandas, or of what looks like one."""
    return hasattr(given, "to_numpy") and hasattr(given, "index")


WHOLE_TABLE = "or one table of all clients: fedmoe.federation_from_table(frame, client=..., label=...)"


def read_examples(source: ExampleArrays, whose: str, num_classes: int | None, task: TaskName) -> Examples:
    x, y = (as_tensor(array, whose) for array in source[:2])
    are_classes = task == "classification"
    most_axes, wanted = (1, "one label number per row") if are_classes else (2, "one or more numbers per row")
    if not 1 <= y.dim() <= most_axes or x.dim() < 1 or len(x) != len(y) or 0 in y.shape[1:]:
        raise DataError(f"{whose}: x has shape {tuple(x.shape)} and y {tuple(y.shape)}. Give {wanted}.")
    if x.is_complex() or y.is_complex():
        raise DataError(
            f"{whose}: {'x' if x.is_complex() else 'y'} is complex. Give real numbers, such as (real, imag)."
        )
    x = x.to(torch.float32) if x.is_floating_point() else x
    _require_finite(x, whose, "x")
    side = _side(source[2:], whose, len(y))
    if are_classes:
        return examples(x, _whole_numbers(y, whose, "label", num_classes), side)
    y = y.to(torch.float32)
    _require_finite(y, whose, "y")
    return examples(x, y, side)


def _require_finite(values: Tensor, whose: str, what: str) -> None:
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
        raise DataError(f"{whose}, row {row}: {what} holds NaN or infinity (as float32). Fix or drop the row.")


def read_mask(whose: str, opted_out: OptedOut, size: int) -> Tensor:
    """(N,) bool, True where a row is opted out."""
    if isinstance(opted_out, bool | np.bool_):
        return torch.full((size,), bool(opted_out))
    mask = as_tensor(opted_out, f"opted_out of {whose}")
    if mask.dtype != torch.bool or mask.shape != (size,):
        kind = f"{mask.dtype} of shape {tuple(mask.shape)}, for {size} training rows"
        raise DataError(f"opted_out of {whose} is {kind}. Give one bool per row, or True for the whole client.")
    return mask


def _side(given: Sequence[Any], whose: str, size: int) -> Tensors:
    if not all(isinstance(one, Mapping) for one in given):
        raise DataError(f"{whose}: side information is a {type(given[0]).__name__}. Give a dict of arrays by name.")
    arrays = {name: as_tensor(array, f"{whose}, {name!r}") for one in given for name, array in one.items()}
    for name, array in arrays.items():
        if array.shape != (size,):
            raise DataError(
                f"{whose}: {name!r} has shape {tuple(array.shape)}, for {size} rows. Give a number per row."
            )
    return {name: _whole_numbers(array, whose, repr(name), None) for name, array in arrays.items()}


def _stacked(items: Sequence[Any], whose: str, are_sequences: bool) -> ExampleArrays:
    xs, ys, sides = list[Tensor](), list[Any](), list[Mapping[str, Any]]()
    for row, item in enumerate(items):
        if not (isinstance(item, tuple | list) and len(item) in (2, 3)):
            raise DataError(
                f"{whose}, row {row}: the Dataset gives a {type(item).__name__}, not a pair (x, y). Say with collate= "
                "how a list of such rows becomes (x, y)."
            )
        xs.append(as_tensor(item[0], f"{whose}, row {row}"))
        ys.append(item[1] if isinstance(item[1], str) else as_tensor(item[1], f"{whose}, row {row}"))
        if not isinstance(side := item[2] if len(item) == 3 else {}, Mapping):
            raise DataError(f"{whose}, row {row}: side information is a {type(side).__name__}, not a dict by name.")
        sides.append(side)
        if not isinstance(ys[row], str) and (ys[row].dim() > 1 or ys[row].shape != getattr(ys[0], "shape", ())):
            raise DataError(f"{whose}, row {row}: y is no number, or has another shape than the first.")
        if not are_sequences and xs[row].shape != xs[0].shape:
            raise DataError(
                f"{whose}, row {row}: x has another shape than the first. Pad sequences of different lengths "
                "with sequence_length='longest'."
            )
        if set(sides[row]) != set(sides[0]):
            raise DataError(
                f"{whose}, row {row}: side information is {sorted(sides[row])}, of row 0 {sorted(sides[0])}."
            )
    if not xs:
        return torch.zeros(0), torch.zeros(0)
    side = {name: torch.stack([as_tensor(one[name], whose) for one in sides]) for name in sides[0]}
    labels = ys if any(isinstance(y, str) for y in ys) else torch.stack(ys)
    return (xs if are_sequences else torch.stack(xs)), labels, side  # type: ignore[return-value]


def as_tensor(array: Any, whose: str) -> Tensor:
    """Shares the memory of what was given; only an array that may not be written to is copied."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    if hasattr(array, "toarray") or (isinstance(array, Tensor) and array.layout != torch.strided):
        dense = "to_dense" if isinstance(array, Tensor) else "toarray"
        raise DataError(f"{whose}: a {type(array).__name__} is sparse. Give a dense array: x.{dense}().")
    try:
        return torch.as_tensor(array).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{whose}: a {type(array).__name__} is no array of numbers ({error}). Convert it; rows of different "
            "lengths want sequence_length='longest'."
        ) from error


def _whole_numbers(values: Tensor, whose: str, what: str, num_classes: int | None) -> Tensor:
    number = values if values.is_floating_point() else values.to(torch.int64)
    highest = torch.iinfo(torch.int64).max - 1 if num_classes is None else num_classes - 1
    wrong = ((number < 0) | (number > highest) | (number != number.to(torch.int64))).nonzero()
    if len(wrong):
        row, upper = int(wrong[0]), "" if num_classes is None else f" to num_classes - 1 = {highest}"
        or_numbers = ", or say task='regression' where numbers are predicted" if what == "label" else ""
        raise DataError(
            f"{whose}, row {row}: the {what} is {number[row].item()}. Give integers from 0{upper}{or_numbers}."
        )
    return number.to(torch.int64)
