"""Partitions made elsewhere, as lists of row numbers: those of Flower Datasets' partitioners, or any of that form.

Nothing of Flower is imported: a partitioner is asked for what its public interface has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedmoe.errors import DataError
from fedmoe.partition.per_client_holdout import Cut, split_own_rows
from fedmoe.partition.split import Indices, Shards, Split

ROW_FIELD = "row"
Partitions = Mapping[int, Sequence[int] | NDArray[np.integer]]


def split_from_partitions(
    partition_to_indices: Partitions,
    num_rows: int,
    test_labels: NDArray[np.generic],
    num_classes: int,
    *,
    num_clients: int | None = None,
    num_unseen: int = 0,
    cut: Cut | None = None,
    global_test_size: int,
    seed: int,
) -> Split:
    """One client per partition, in the order of their numbers; its rows of the training part are cut as `cut` says.

    `num_rows` is the length of the training part, which the numbers must not leave.
    """
    lists = [_rows(partition_to_indices[key], key) for key in sorted(partition_to_indices)]
    groups = Shards.from_lists(lists)
    _require_rows_once(groups.rows, num_rows)
    return split_own_rows(
        groups,
        test_labels,
        num_classes,
        cut or Cut(),
        num_clients=num_clients,
        num_unseen=num_unseen,
        global_test_size=global_test_size,
        seed=seed,
    )


def from_flower_partitioner(partitioner: Any, row_field: str = ROW_FIELD) -> dict[int, Indices]:
    """Row numbers by partition, of a partitioner that has been given its data set.

    Some partitioners tell them (`partition_id_to_indices`: by size, linear, continuous …). Others (Dirichlet, iid,
    natural id …) only load partitions: add a column of row numbers to their data set first, as in
    ``dataset.add_column("row", range(len(dataset)))``, and they are read from it.
    """
    number = int(partitioner.num_partitions)  # also makes lazy partitioners do their work
    known = getattr(partitioner, "partition_id_to_indices", None)
    if known:
        return {int(key): _rows(rows, key) for key, rows in known.items()}
    found = {}
    for key in range(number):
        partition = partitioner.load_partition(key)
        if row_field not in partition.column_names:
            raise DataError(
                f"{type(partitioner).__name__} does not tell row numbers, and its data set has no column "
                f"{row_field!r}. Add one with dataset.add_column({row_field!r}, range(len(dataset))) before it splits."
            )
        found[key] = _rows(partition[row_field], key)
    return found


def _rows(rows: ArrayLike, key: Any) -> Indices:
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(f"partition {key} is not a list of row numbers but {array.dtype} of shape {array.shape}.")
    return array.astype(np.int64)


def _require_rows_once(rows: Indices, num_rows: int) -> None:
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if outside.size:
        raise DataError(
            f"a partition names row {outside[0]}, but the training part has rows 0 to {num_rows - 1}. "
            "Partition the same data set that is loaded here."
        )
    times = np.bincount(rows, minlength=1)
    if times.max() > 1:
        raise DataError(
            f"row {times.argmax()} is in more than one partition, or twice in one. Give every row to one client."
        )
