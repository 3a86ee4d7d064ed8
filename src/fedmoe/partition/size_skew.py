"""Size skew: labels are iid, the number of rows per client is log-normal above a floor.

Made of whole arrays: a million clients take seconds. Suffix: C clients (those that train, then the unseen ones).
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedmoe.errors import ConfigError
from fedmoe.partition.by_label import require_floor, train_part
from fedmoe.partition.quotas import Pools, offsets, quotas, require_rows, require_sizes, separate, stream
from fedmoe.partition.split import Indices, Shards, Split


def split_by_size(
    train_labels: NDArray[np.int64],
    test_labels: NDArray[np.int64],
    num_classes: int,
    *,
    num_clients: int,
    num_unseen: int = 0,
    sigma: float,
    min_size: int = 2,
    train_size: int,
    validation_size: int,
    test_size: int,
    global_test_size: int,
    seed: int,
) -> Split:
    """Sizes are means over clients, as in a split by Dirichlet; sigma = 0 makes all clients equal.

    Each client has `min_size` rows and a log-normal part of the rest. Its `test_size` test rows are iid like its
    training rows, and may be shared with other clients.
    """
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    counts = {"num_clients": num_clients, "num_unseen": num_unseen, "min_size": min_size}
    require_sizes(global_test_size=global_test_size, **counts, **sizes)
    _require_sigma(sigma)
    require_floor(min_size, train_size + validation_size)
    require_rows(num_clients, num_unseen, train_size, validation_size, len(train_labels))
    _require_test_rows(test_size, len(test_labels))
    all_clients = num_clients + num_unseen
    sizes_C = log_normal_sizes(all_clients, train_size + validation_size, sigma, min_size, seed)
    order = stream(seed, "iid").permutation(len(train_labels))[: sizes_C.sum()].astype(np.int64)
    dealt = Shards(offsets(sizes_C), order)
    train, validation = separate(dealt, train_part(sizes_C, train_size, validation_size))
    test = windows(len(test_labels), test_size, all_clients, seed)
    pools = Pools(test_labels, num_classes, seed, "test")
    global_test = pools.balanced(global_test_size, stream(seed, "global test"))
    return Split(num_clients, num_unseen, train, validation, test, global_test)


def log_normal_sizes(num_clients: int, mean_size: int, sigma: float, min_size: int, seed: int) -> Indices:
    """Whole sizes of the given mean, none below `min_size`.

    >>> log_normal_sizes(4, 25, 0.0, 2, seed=0)
    array([25, 25, 25, 25])
    """
    rng = stream(seed, "sizes")
    normal_C = rng.standard_normal(num_clients)
    shares_C = np.exp(sigma * (normal_C - normal_C.max()))  # the largest is 1, so no sigma overflows
    return min_size + quotas(num_clients * (mean_size - min_size), shares_C, rng)


def windows(num_rows: int, size: int, num_clients: int, seed: int) -> Shards:
    """`size` random rows for each client, none twice: a window at a random place of one random circle of all rows."""
    circle = stream(seed, "own test circle").permutation(num_rows).astype(np.int64)
    start_C = stream(seed, "own test").integers(num_rows, size=num_clients)
    rows = circle[(start_C[:, None] + np.arange(size)) % num_rows]
    return Shards(np.arange(num_clients + 1, dtype=np.int64) * size, rows.reshape(-1))


def _require_sigma(sigma: float) -> None:
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise ConfigError(
            f"split.sigma={sigma} is not a standard deviation. Set it between 0 (all clients alike) and 3 (a few "
            "clients hold most rows)."
        )


def _require_test_rows(test_size: int, supply: int) -> None:
    if test_size > supply:
        raise ConfigError(
            f"split.test_size={test_size} is more than the {supply} test rows of the data set. Lower test_size."
        )
