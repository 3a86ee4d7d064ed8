"""Clients as they are: one per value of a field of the data set, such as the writer or the user."""

import numpy as np
from numpy.typing import NDArray

from fedmoe.partition.per_client_holdout import HoldoutSizes, split_by_client
from fedmoe.partition.quotas import offsets
from fedmoe.partition.split import Shards, Split


def split_by_field(
    values: NDArray[np.generic],
    test_labels: NDArray[np.generic],
    num_classes: int,
    *,
    num_clients: int | None = None,
    num_unseen: int = 0,
    train_size: int | None = None,
    validation_size: int | None = None,
    test_size: int | None = None,
    validation_share: float = 0.1,
    test_share: float = 0.2,
    min_size: int = 10,
    global_test_size: int,
    seed: int,
) -> Split:
    """`values` has one value per training row; `num_clients=None` takes all that have `min_size` rows."""
    holdout = HoldoutSizes(train_size, validation_size, test_size, validation_share, test_share, min_size)
    return split_by_client(
        group_by_value(values),
        test_labels,
        num_classes,
        holdout,
        num_clients=num_clients,
        num_unseen=num_unseen,
        global_test_size=global_test_size,
        seed=seed,
    )


def group_by_value(values: NDArray[np.generic]) -> Shards:
    """The rows of each value, values in rising order.

    >>> group_by_value(np.array([7, 3, 7])).of(1)
    array([0, 2])
    """
    _, sizes = np.unique(values, return_counts=True)
    return Shards(offsets(sizes.astype(np.int64)), np.argsort(values, kind="stable").astype(np.int64))
