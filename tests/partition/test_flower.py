"""Stand-ins with the public attributes of Flower Datasets' partitioners: no Flower is needed here."""

import numpy as np
import pytest

from fedmoe.errors import DataError
from fedmoe.partition.flower import from_flower_partitioner, split_from_partitions
from fedmoe.partition.per_client_holdout import Cut

TEST = np.arange(50) % 5


class Columns:
    def __init__(self, **columns: list[int]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, name: str) -> list[int]:
        return self.columns[name]


class Lists:
    """Like SizePartitioner: tells which rows it gave to whom."""

    num_partitions = 3

    @property
    def partition_id_to_indices(self) -> dict[int, list[int]]:
        return {2: [9, 8, 7, 6, 5], 0: list(range(10, 30)), 1: list(range(30, 60))}


class Loads:
    """Like DirichletPartitioner: can only load."""

    num_partitions = 2

    def __init__(self, **extra: list[int]) -> None:
        self.extra = extra

    def load_partition(self, partition_id: int) -> Columns:
        return Columns(label=[0, 1, 2], **{name: rows[partition_id::2] for name, rows in self.extra.items()})


def split(partitions, **changes):
    return split_from_partitions(partitions, 60, TEST, 5, **{"global_test_size": 10, "seed": 0, **changes})


def test_clients_are_the_partitions_in_order():
    found = split(from_flower_partitioner(Lists()), cut=Cut(min_size=3))
    assert found.num_clients == 3 and found.own_test == "train"
    for client, rows in enumerate([set(range(10, 30)), set(range(30, 60)), {5, 6, 7, 8, 9}]):
        parts = [set(shards.of(client).tolist()) for shards in (found.train, found.validation, found.test)]
        assert set.union(*parts) == rows and sum(map(len, parts)) == len(rows) and all(parts)
    assert np.bincount(TEST[found.global_test]).tolist() == [2] * 5


def test_small_partitions_are_left_out_and_some_kept_unseen():
    found = split(Lists().partition_id_to_indices, num_unseen=1)
    assert (found.num_clients, found.num_unseen) == (1, 1)


def test_row_numbers_are_read_from_a_column_where_the_partitioner_does_not_tell():
    rows = from_flower_partitioner(Loads(row=list(range(6))))
    assert {key: value.tolist() for key, value in rows.items()} == {0: [0, 2, 4], 1: [1, 3, 5]}


def test_without_rows_or_column_the_remedy_is_named():
    with pytest.raises(DataError, match=r"Loads does not tell row numbers.*add_column\('row', range"):
        from_flower_partitioner(Loads())


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ({0: [0, 1, 60]}, r"names row 60, but the training part has rows 0 to 59"),
        ({0: [0, -1, 2]}, r"names row -1"),
        ({0: [0, 1, 2], 1: [2, 3, 4]}, r"row 2 is in more than one partition"),
        ({0: [0.5, 1.0]}, r"partition 0 is not a list of row numbers but float64"),
    ],
)
def test_partitions_of_another_data_set_are_refused(partitions, message):
    with pytest.raises(DataError, match=message):
        split(partitions, cut=Cut(min_size=3))
