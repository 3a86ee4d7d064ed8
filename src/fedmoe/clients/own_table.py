"""A table with a column that says whose row it is, as a federation: a pandas frame, a CSV or parquet file, rows.

Shape suffixes: N rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedmoe.clients.common_knowledge import require_known
from fedmoe.clients.federation import Federation
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.clients.own_records import OptedOut, TaskName, read_mask
from fedmoe.data.cells import texts_of
from fedmoe.data.raw_table import RawTable, TableLike, as_raw_table
from fedmoe.data.tables import Categories, Mask, find_schema
from fedmoe.errors import DataError
from fedmoe.partition.split import Indices

TRUE, FALSE = {"true", "yes", "y", "1"}, {"false", "no", "n", "0"}


def federation_from_table(
    table: TableLike,
    *,
    client: str,
    label: str | Sequence[str],
    task: TaskName = "classification",
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    categories: Categories | None = None,
    classes: Sequence[Any] | None = None,
    standardize: bool = False,
    unseen: Collection[str] = (),
    global_test: TableLike | None = None,
    opted_out: str | Collection[str] | Mapping[str, OptedOut] | None = None,
    validation_share: float = 0.2,
    test_share: float = 0.2,
    seed: int = 0,
) -> Federation:
    """One client per value of the column `client`; what a model reads of a row is `federation.table`.

    Columns of numbers are inputs as they are, columns of words one input per category. Which they are, and the classes,
    is found in rows that may be shared: opted in, of clients that are not unseen. A missing value is refused.

    Args:
        table: a pandas frame, the path of a .csv or .parquet file, columns by name, or rows as dicts.
        label: the column of the class: words or whole numbers, which become `federation.class_names`. With
            task="regression" the column of the numbers to predict, or several columns.
        features: the columns that a model reads; default: all but client, label and those of `ignore`.
        categories: columns that hold categories although they look like numbers, or, by name, all their values.
        classes: all labels in their order; default: those found, sorted.
        standardize: give columns of numbers mean 0 and deviation 1, measured on rows that may be shared.
        opted_out: names of clients; or the column that says so of each row (true, yes, 1), which is then no feature;
            or by client True, or one bool per row in the order of the table.
        unseen, global_test, validation_share, test_share, seed: see `federation_from_clients`.

    >>> rows = [{"ward": "ab"[n % 2], "age": n, "sex": "fm"[n % 2], "ill": "yes" if n > 9 else "no"} for n in range(20)]
    >>> federation = federation_from_table(rows, client="ward", label="ill")
    >>> federation.names, federation.class_names, federation.table.input_names
    (['a', 'b'], ('no', 'yes'), ('age', 'sex=f', 'sex=m'))
    """
    raw = as_raw_table(table)
    rows = rows_by_client(raw, client)
    require_known("unseen", unseen, rows)
    out_N = _opted_out(raw, opted_out, rows)
    shared_N = ~out_N
    for name in unseen:
        shared_N[rows[name]] = False
    if not shared_N.any():
        raise DataError(f"{raw.source} has no row that may be shared. Opt in a client that is not unseen.")
    ignored = [*ignore, opted_out] if isinstance(opted_out, str) else ignore
    schema = find_schema(
        raw,
        shared_N,
        client=client,
        label=label,
        features=features,
        ignore=ignored,
        categories=categories,
        classes=classes,
        standardize=standardize,
        regression=task == "regression",
    )
    x, y = schema.encode(raw), schema.labels(raw)
    test = None if global_test is None else as_raw_table(global_test)
    federation = federation_from_clients(
        {name: (x[at], y[at]) for name, at in rows.items()},
        class_names=schema.classes or None,
        task=task,
        unseen=unseen,
        global_test=None if test is None else (schema.encode(test), schema.labels(test)),
        opted_out={name: torch.from_numpy(out_N[at]) for name, at in rows.items()},
        validation_share=validation_share,
        test_share=test_share,
        seed=seed,
    )
    return replace(federation, table=schema)


def rows_by_client(raw: RawTable, client: str) -> dict[str, Indices]:
    """Row numbers by the client's name, in the order of first appearance."""
    names, owner_N = np.unique(texts_of(raw, raw.column(client, "client="), client), return_inverse=True)
    rows = np.split(np.argsort(owner_N, kind="stable"), np.cumsum(np.bincount(owner_N))[:-1])
    return {str(names[at]): rows[at] for at in sorted(range(len(names)), key=lambda at: int(rows[at][0]))}


def _opted_out(raw: RawTable, given: Any, rows: Mapping[str, Indices]) -> Mask:
    """(N,) bool, True where a row is opted out."""
    out_N = np.zeros(len(raw), dtype=np.bool_)
    if isinstance(given, str):
        if given in rows and given not in raw.columns:
            raise DataError(
                f"opted_out={given!r} is a client, not a column. To opt a client out write opted_out=[{given!r}]."
            )
        words = [word.lower() for word in texts_of(raw, raw.column(given, "opted_out="), given)]
        for row, word in enumerate(words):
            if word not in TRUE | FALSE:
                raise DataError(
                    f"{raw.place(row)}, column {given!r}: {word!r} does not say whether the row is opted out. "
                    "Write true or false."
                )
        return np.array([word in TRUE for word in words])
    given = given or {}
    require_known("opted_out", given, rows)
    for name in given:
        whole_or_mask = given[name] if isinstance(given, Mapping) else True
        out_N[rows[name]] = read_mask(f"client {name!r}", whole_or_mask, len(rows[name])).numpy()
    return out_N
