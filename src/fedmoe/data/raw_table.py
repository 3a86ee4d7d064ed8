"""Tables as people have them, read into columns of cells: CSV, parquet, pandas frames, dicts of columns, lists of rows.

CSV is read by the standard library wherever it is read, so that the same file means the same with and without pandas.
"""

import csv
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmoe.data.formats import LARGEST, open_unpacked, read_up_to
from fedmoe.errors import DataError
from fedmoe.paths import expanded

# A pandas frame, a path, columns by name, rows as dicts, or one row.
TableLike = Any
Cells = NDArray[Any]  # numbers (NaN: missing), or objects (None: missing)
DELIMITERS = (",", ";", "\t")
SUFFIXES = ".csv, .csv.gz, .tsv or .parquet"


@dataclass(frozen=True)
class RawTable:
    """Columns of equal length by name."""

    columns: dict[str, Cells]
    source: str  # how messages call it
    lines: Sequence[int] | None = None  # of a text file: the line that each row ends in
    categorical: tuple[str, ...] = ()  # columns that pandas calls so, whatever they look like

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def place(self, row: int) -> str:
        return f"{self.source}, " + (f"row {row}" if self.lines is None else f"line {self.lines[row]}")

    def column(self, name: str, setting: str) -> Cells:
        if name not in self.columns:
            raise DataError(
                f"{self.source} has no column {name!r} ({setting}). It has: {', '.join(map(repr, self.columns))}."
            )
        return self.columns[name]


def as_raw_table(given: TableLike) -> RawTable:
    if isinstance(given, RawTable):
        return given
    if isinstance(given, str | Path):
        table = read_table_file(expanded(given))
    elif hasattr(given, "columns") and hasattr(given, "isna"):
        table = _from_frame(given, "the frame")
    elif isinstance(given, Mapping):
        table = _from_columns(given)
    elif isinstance(given, Sequence) and all(isinstance(row, Mapping) for row in given):
        table = _from_rows(given)
    else:
        raise DataError(
            f"a {type(given).__name__} is no table. Give a pandas frame, the path of a {SUFFIXES} file, columns by "
            "name, or rows as dicts."
        )
    if not len(table):
        raise DataError(f"{table.source} has no rows. Give at least one.")
    return table


def read_table_file(path: Path) -> RawTable:
    name = path.name.lower()
    if name.endswith((".csv", ".tsv", ".csv.gz")):
        return _read_csv(path)
    if name.endswith((".parquet", ".pq")):
        return _read_parquet(path)
    raise DataError(f"{path} is no table that can be read. Give a {SUFFIXES} file.")


def _read_csv(path: Path) -> RawTable:
    try:
        with open_unpacked(path) as file:
            content = read_up_to(file, LARGEST + 1)
        if len(content) > LARGEST:
            raise DataError(f"{path} holds more than {LARGEST} bytes. Split it, or keep fewer columns.")
        text = content.decode("utf-8-sig")
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}). Name an existing file.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    head = text.split("\n", 1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(DELIMITERS, key=head.count), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _require_names(header, str(path))
        lines, rows = list[int](), list[list[str]]()
        for row in reader:
            if not row:
                continue  # a blank line
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(row)} cells, but the header names {len(header)} columns. "
                    "Fix the line; a cell that holds the separator is put in quotes."
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: this is not sound CSV ({error}). Fix the line.") from error
    cells = [[cell.strip() or None for cell in column] for column in zip(*rows, strict=True)]
    return RawTable({n: _objects(column) for n, column in zip(header, cells, strict=bool(rows))}, str(path), lines)


def _read_parquet(path: Path) -> RawTable:
    try:
        pandas = importlib.import_module("pandas")
        importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: parquet is read with pandas and pyarrow, and {error.name} is not installed. Install them with "
            "`pip install 'fedmoe[table]'`, or save the table as CSV."
        ) from error
    try:
        frame = pandas.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise DataError(f"{path} cannot be read as parquet ({error}).") from error
    return _from_frame(frame, str(path))


def _from_frame(frame: Any, source: str) -> RawTable:
    names = [str(name) for name in frame.columns]
    _require_names(names, source)
    columns, categorical = {}, []
    for at, name in enumerate(names):
        series = frame.iloc[:, at]
        if str(series.dtype) == "category":
            categorical.append(name)
        if series.dtype.kind in "iuf" and isinstance(series.dtype, np.dtype):
            columns[name] = series.to_numpy()
            continue
        cells = series.to_numpy(dtype=object).copy()
        cells[series.isna().to_numpy(dtype=bool)] = None
        columns[name] = cells
    return RawTable(columns, source, categorical=tuple(categorical))


def _from_columns(given: Mapping[Any, Any]) -> RawTable:
    if all(value is None or isinstance(value, str | float | int | np.generic) for value in given.values()):
        return _from_rows([given])
    columns = {}
    for name, values in given.items():
        array = values if isinstance(values, np.ndarray) else np.asarray(values)
        columns[str(name)] = array if array.dtype.kind in "iuf" else _objects(list(values))
    sizes = {name: column.shape for name, column in columns.items()}
    if len(set(sizes.values())) > 1 or any(len(shape) != 1 for shape in sizes.values()):
        raise DataError(f"the columns have shapes {sizes}. Give each one cell per row.")
    return RawTable(columns, "the table")


def _from_rows(rows: Sequence[Mapping[Any, Any]]) -> RawTable:
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    return RawTable({name: _objects([row.get(name) for row in rows]) for name in names}, "the table")


def _objects(cells: Sequence[Any]) -> Cells:
    column = np.empty(len(cells), dtype=object)
    column[:] = cells
    return column


def _require_names(names: Sequence[str], source: str) -> None:
    if not any(names):
        raise DataError(f"{source} is empty: it has no header with the names of its columns.")
    for at, name in enumerate(names):
        if not name:
            raise DataError(f"{source}: column {at + 1} of the header has no name. Give it one.")
        if name in names[:at]:
            raise DataError(f"{source} has two columns {name!r}. Rename one of them.")
