"""New rows for a model, from a file or from what a request holds: as the tensor x that the model was trained on.

Rows of a table (.csv, .tsv, .parquet, dicts) are read by the schema that a run recorded. Without one, every column is a
number, in the order of the inputs. An .npz file holds x as it is.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.cells import numbers
from fedmoe.data.npz import read_npz
from fedmoe.data.raw_table import RawTable, as_raw_table, read_table_file
from fedmoe.data.tables import TableSchema
from fedmoe.errors import DataError


class RowReader(NamedTuple):
    """What a model reads: rows of a table, or arrays of one shape and type."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    table: TableSchema | None = None
    reads_texts: bool = False  # ids of words, of which 0 is padding

    def file(self, path: Path) -> Tensor:
        """(N, *input shape)."""
        if path.suffix.lower() == ".npz":
            arrays = read_npz(path)
            if "x" not in arrays:
                raise DataError(f"{path} holds {', '.join(sorted(arrays)) or 'no array'}, not x. Save it as x=....")
            return self._tensor(arrays["x"], str(path))
        if self.table is not None:
            return self.table.encode(path)
        return self._columns(read_table_file(path))

    def array(self, x: NDArray[Any], source: str = "x") -> Tensor:
        """Rows that are an array already."""
        return self._tensor(x, source)

    def values(self, rows: Any) -> Tensor:
        """Rows as JSON has them: dicts by column where the model was trained on a table, else nested lists.

        Texts may be of different lengths: they are padded at the end.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
            raise DataError("rows is no list of at least one row.")
        if all(isinstance(row, dict) for row in rows):
            return self.table.encode(rows) if self.table is not None else self._columns(as_raw_table(rows))
        try:
            array = np.array(self._padded(rows) if self.reads_texts and len(self.input_shape) == 1 else rows)
        except ValueError:
            raise DataError("the rows have different lengths. Give each the same shape.") from None
        if array.dtype.kind not in "biuf":
            raise DataError(f"the rows hold something else than numbers (as NumPy reads them: {array.dtype}).")
        return self._tensor(array, "rows")

    def _padded(self, rows: Sequence[Any]) -> list[Any]:
        (most,) = self.input_shape
        for number, row in enumerate(rows):
            if isinstance(row, Sequence) and not isinstance(row, str) and len(row) > most:
                raise DataError(f"row {number} has {len(row)} words, but the model reads {most}. Cut it.")
        return [[*row, *[0] * (most - len(row))] if isinstance(row, Sequence) else row for row in rows]

    def _columns(self, table: RawTable) -> Tensor:
        wanted = math.prod(self.input_shape)
        if len(table.columns) != wanted:
            raise DataError(
                f"{table.source} has {len(table.columns)} columns, but the model reads {wanted} numbers (shape "
                f"{self.input_shape}): one column each, in their order, and no others."
            )
        array = np.stack([numbers(cells) for cells in table.columns.values()], axis=1)
        broken = np.argwhere(~np.isfinite(array))
        if len(broken):
            row, column = broken[0].tolist()
            name = list(table.columns)[column]
            raise DataError(f"{table.place(row)}, column {name!r}: this is no finite number. Fix the value.")
        return self._tensor(array.reshape(-1, *self.input_shape), table.source)

    def _tensor(self, array: Any, source: str) -> Tensor:
        if array.shape[1:] != self.input_shape or not len(array):
            wanted = ", ".join(map(str, ("N", *self.input_shape)))
            raise DataError(
                f"{source}: x has shape {array.shape}, but the model reads ({wanted}), N rows of at least 1."
            )
        whole = not self.input_dtype.is_floating_point
        if whole and array.dtype.kind == "f" and not np.array_equal(array, np.round(array)):
            raise DataError(f"{source}: the model reads whole numbers, and some of these are not.")
        with np.errstate(over="ignore"):
            x = torch.from_numpy(np.array(array, dtype=np.int64 if whole else np.float32)).to(self.input_dtype)
        broken = (~x.isfinite()).reshape(len(x), -1).any(1).nonzero()
        if len(broken):
            raise DataError(f"{source}, row {int(broken[0])}: x holds NaN or infinity (as float32). Fix the row.")
        return x
