"""How the rows of a table become numbers: which columns a model reads, their categories, and what labels are called.

A schema is made once, from rows that may be shared, is stored with a run, and reads new rows in the same way later.
Shape suffixes: N rows, F inputs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.cells import in_order, numbers, text, texts, texts_of
from fedmoe.data.raw_table import Cells, RawTable, TableLike, as_raw_table
from fedmoe.errors import DataError

MOST_CATEGORIES = 256  # found in one column; more is a column of names or numbers of rows, or wants to be declared
MISSING_MARKS = {"na", "n/a", "nan", "null", "none", "?", "-"}  # in a column of numbers
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+")
Mask = NDArray[np.bool_]
# Columns that hold categories: their names, or all values by name (none: those that the rows show).
Categories = Sequence[str] | Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class FeatureColumn:
    """A number is one input, shifted and scaled; a category is one input per known value, 1 where the cell has it."""

    name: str
    kind: Literal["number", "category"]
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @property
    def width(self) -> int:
        return len(self.categories) if self.kind == "category" else 1

    def encode(self, table: RawTable) -> NDArray[np.float32]:
        """(N, width)."""
        cells = table.column(self.name, "a feature of the model")
        return self._one_hot(table, cells) if self.kind == "category" else self._scaled(table, cells)

    def _scaled(self, table: RawTable, cells: Cells) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            values_N = ((numbers(cells) - self.mean) / self.scale).astype(np.float32)
        for row in np.flatnonzero(~np.isfinite(values_N)).tolist():
            where, cell = f"{table.place(row)}, column {self.name!r}", text(cells[row])
            if cell is None or cell.lower() in MISSING_MARKS:
                raise DataError(f"{where}: the value is missing{_shown(cell)}. Fill it in, or drop the row.")
            raise DataError(f"{where}: {cell!r} is no finite number. Fix the value, or declare the column a category.")
        return values_N[:, None]

    def _one_hot(self, table: RawTable, cells: Cells) -> NDArray[np.float32]:
        words = texts_of(table, cells, self.name)
        known = {category: at for at, category in enumerate(self.categories)}
        for row, cell in enumerate(words):
            if cell not in known:
                raise DataError(
                    f"{table.place(row)}, column {self.name!r}: the category {cell!r} is not known. "
                    + unknown_words(self.categories, cell, f"categories={{{self.name!r}: …}}")
                )
        values_NF = np.zeros((len(words), self.width), dtype=np.float32)
        values_NF[np.arange(len(words)), [known[cell] for cell in words]] = 1
        return values_NF


@dataclass(frozen=True)
class TableSchema:
    """What turns rows into x (and labels into y); as plain as JSON (`to_dict`)."""

    features: tuple[FeatureColumn, ...]
    label: str
    client: str
    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()  # of a regression: columns of the numbers to predict, `label` the first of them

    @property
    def num_inputs(self) -> int:
        return sum(column.width for column in self.features)

    @property
    def input_names(self) -> tuple[str, ...]:
        """What each number of x is: `age`, `ward=north`, `ward=south`."""
        return tuple(
            f"{column.name}={category}" if category is not None else column.name
            for column in self.features
            for category in (column.categories if column.kind == "category" else (None,))
        )

    def encode(self, rows: TableLike) -> Tensor:
        """x (N, F) float32 of a frame, a file, columns or rows; columns that are no features are passed over."""
        table = as_raw_table(rows)
        return torch.from_numpy(np.concatenate([column.encode(table) for column in self.features], axis=1))

    def labels(self, rows: TableLike) -> Tensor:
        """y (N,): the number of each row's class; of a regression its numbers, (N,) or (N, T)."""
        table = as_raw_table(rows)
        if self.targets:
            y_NT = np.concatenate([FeatureColumn(name, "number").encode(table) for name in self.targets], axis=1)
            return torch.from_numpy(y_NT if len(self.targets) > 1 else y_NT[:, 0].copy())
        known = {name: number for number, name in enumerate(self.classes)}
        words = texts_of(table, table.column(self.label, "the label"), self.label)
        for row, cell in enumerate(words):
            if cell not in known:
                raise DataError(
                    f"{table.place(row)}, column {self.label!r}: the label {cell!r} is not known. "
                    + unknown_words(self.classes, cell, "classes=…")
                )
        return torch.tensor([known[cell] for cell in words], dtype=torch.int64)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "TableSchema":
        try:
            columns = [{**column, "categories": tuple(column["categories"])} for column in stored["features"]]
            features = tuple(FeatureColumn(**column) for column in columns)
            targets = tuple(stored.get("targets", ()))
            return cls(features, stored["label"], stored["client"], tuple(stored["classes"]), targets)
        except (KeyError, TypeError) as error:
            raise DataError(f"this is no stored table schema ({error}). Train the model again.") from error


def find_schema(
    table: RawTable,
    shared_N: Mask,
    *,
    client: str,
    label: str | Sequence[str],
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    categories: Categories | None = None,
    classes: Sequence[Any] | None = None,
    standardize: bool = False,
    regression: bool = False,
) -> TableSchema:
    """From the rows of `shared_N` alone: no other row may shape a model that is sent."""
    declared = {
        **dict.fromkeys(table.categorical, ()),
        **(categories if isinstance(categories, Mapping) else dict.fromkeys(categories or (), ())),
    }
    labels = (label,) if isinstance(label, str) else tuple(label)
    _require_labels(table, labels, classes, regression)
    chosen = features if features is not None else [n for n in table.columns if n not in {client, *labels, *ignore}]
    for setting, names in {"features": chosen, "ignore": ignore, "categories": declared}.items():
        for name in names:
            table.column(name, f"named in {setting}")
    if not chosen:
        raise DataError(f"{table.source} has no column beside {client!r} and {labels[0]!r} to learn from.")
    return TableSchema(
        features=tuple(_feature(table, name, shared_N, declared.get(name), standardize) for name in chosen),
        label=labels[0],
        client=client,
        classes=() if regression else _classes(table, labels[0], shared_N, classes),
        targets=labels if regression else (),
    )


def _require_labels(table: RawTable, labels: Sequence[str], classes: Sequence[Any] | None, regression: bool) -> None:
    for name in labels:
        table.column(name, "label=")
    if len(set(labels)) != len(labels) or not labels:
        raise DataError(f"label={list(labels)} names no column, or one twice. Name each column that is predicted once.")
    if regression and classes is not None:
        raise DataError("classes= is given, but task='regression' has no classes. Leave one of them away.")
    if not regression and len(labels) > 1:
        raise DataError(f"label={list(labels)} are several columns, which needs task='regression'. Name one.")


def _feature(
    table: RawTable, name: str, shared_N: Mask, declared: Sequence[Any] | None, standardize: bool
) -> FeatureColumn:
    cells = table.columns[name]
    if declared:
        return FeatureColumn(name, "category", tuple(str(text(one)) for one in declared))
    if declared is None and _holds_numbers(table, name, shared_N):
        if not standardize:
            return FeatureColumn(name, "number")
        values = numbers(cells[shared_N])
        values = values[np.isfinite(values)]  # a missing value is refused when the row is encoded
        return FeatureColumn(name, "number", mean=float(values.mean()), scale=float(values.std()) or 1.0)
    found = {cell for cell in texts(cells[shared_N]) if cell is not None}
    if len(found) > MOST_CATEGORIES:
        raise DataError(
            f"{table.source}, column {name!r} has {len(found)} categories, and each would be an input. Leave it out "
            f"(ignore=[{name!r}]), make numbers of it, or declare them: categories={{{name!r}: …}}."
        )
    return FeatureColumn(name, "category", in_order(found))


def _holds_numbers(table: RawTable, name: str, shared_N: Mask) -> bool:
    """Numbers or words; a column of both is refused, since a few words among numbers are mistakes or missing values."""
    rows, cells = np.flatnonzero(shared_N), table.columns[name]
    is_number = np.isfinite(numbers(cells[rows]))
    left = rows[~is_number]
    others = [(row, cell) for row, cell in zip(left.tolist(), texts(cells[left]), strict=True) if cell is not None]
    words = [(row, cell) for row, cell in others if cell.lower() not in MISSING_MARKS]
    if not is_number.any():
        if not others:
            raise DataError(
                f"{table.source}, column {name!r} has no value in the rows that may be shared. Leave it out "
                f"(ignore=[{name!r}])."
            )
        if all(DECIMAL_COMMA.fullmatch(cell) for _, cell in others):
            row, cell = others[0]
            raise DataError(
                f"{table.place(row)}, column {name!r}: {cell!r} has a decimal comma. Write it with a point."
            )
        return False
    if words:
        row, cell = words[0]
        raise DataError(
            f"{table.place(row)}, column {name!r}: {cell!r} is no number, but other rows have numbers there. Fix the "
            f"value, or say that the column holds categories: categories=[{name!r}]."
        )
    return True


def _classes(table: RawTable, label: str, shared_N: Mask, declared: Sequence[Any] | None) -> tuple[str, ...]:
    cells = table.column(label, "label=")
    if declared is not None:
        return tuple(str(text(one)) for one in declared)
    values = numbers(cells[shared_N])
    if bool((np.isfinite(values) & (values != np.round(values))).any()):
        row = int(np.flatnonzero(shared_N)[np.isfinite(values) & (values != np.round(values))][0])
        raise DataError(
            f"{table.place(row)}, column {label!r}: the label {text(cells[row])!r} is no class. Labels are words or "
            "whole numbers; group measured values into classes, or say task='regression'."
        )
    return in_order({cell for cell in texts(cells[shared_N]) if cell is not None})


def unknown_words(known: Sequence[str], cell: str, declare: str) -> str:
    shown = ", ".join(map(repr, known[:12])) + (", …" if len(known) > 12 else "")
    return (
        f"Known are {shown}: what was declared, or else what the rows that may be shared (opted in, of clients that "
        f"take part) show, since no other row may shape the model that is sent. Declare all of them with {cell!r}: "
        f"{declare}."
    )


def _shown(cell: str | None) -> str:
    return "" if cell is None else f" ({cell!r})"
