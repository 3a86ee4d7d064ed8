"""The cells of a table as numbers or as words."""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmoe.data.raw_table import Cells, RawTable
from fedmoe.errors import DataError

T = TypeVar("T")


def numbers(cells: Cells) -> NDArray[np.float64]:
    """(N,), NaN where a cell is missing or is no number; a truth value is none."""
    if cells.dtype.kind in "iuf":
        return cells.astype(np.float64)
    listed = cells.tolist()
    if not {bool, np.bool_} & set(map(type, listed)):
        with contextlib.suppress(TypeError, ValueError):
            return cells.astype(np.float64)
    return np.array(_each(_number, listed), dtype=np.float64)


def _number(cell: Any) -> float:
    try:
        return float("nan") if isinstance(cell, bool | np.bool_) else float(cell)
    except (TypeError, ValueError):
        return float("nan")


def _each(function: Callable[[Any], T], cells: Sequence[Any]) -> list[T]:
    """The function of each cell, called once for those that are there many times."""
    known: dict[Any, T] = {}
    found = []
    for cell in cells:
        key = cell if type(cell) is str else (type(cell), str(cell))  # 1 and True would be one key
        if key not in known:
            known[key] = function(cell)
        found.append(known[key])
    return found


def text(cell: Any) -> str | None:
    """A cell as a category: `3`, `3.0` and "3.0" are the same one, "007" is not 7; None where it is missing.

    >>> text(3.0), text("3.0"), text("007"), text(True), text(float("nan"))
    ('3', '3', '007', 'True', None)
    """
    if cell is None or (isinstance(cell, float | np.floating) and np.isnan(cell)):
        return None
    return re.sub(r"^([-+]?\d+)\.0+$", r"\1", str(cell).strip()) or None


def texts(cells: Cells) -> list[str | None]:
    """`text` of each."""
    return _each(text, cells.tolist())


def texts_of(table: RawTable, cells: Cells, name: str) -> list[str]:
    """Of the column `name`, in which none may be missing."""
    found = texts(cells)
    if None in found:
        place = table.place(found.index(None))
        raise DataError(f"{place}, column {name!r}: the value is missing. Fill it in, or drop the row.")
    return found  # type: ignore[return-value]


def in_order(found: set[str]) -> tuple[str, ...]:
    """Sorted, whole numbers by their size: the order depends on nothing else."""
    whole = all(re.fullmatch(r"[-+]?\d+", one) for one in found)
    return tuple(sorted(found, key=lambda one: (int(one) if whole else 0, one)))
