"""Size skew: labels are iid, the number of rows per client is log-normal above a floor.

Made of whole arrays: a million clients take seconds. Suffix: C clients (those that train, then the unseen ones).
"""

import math

import numpy as np

from fedmoe.errors import ConfigError
from fedmoe.partition.by_label import require_floor, train_part
from fedmoe.partition.quotas import Labels, Pools, offsets, quotas, require_rows, require_sizes, separate, stream
from fedmoe.partition.settings import SizeSkewSplit
from fedmoe.partition.split import Indices, Shards, Split


def split_by_size(labels: Labels, config: SizeSkewSplit, seed: int) -> Split:
    """Sizes are means over clients, as in a split by Dirichlet; sigma = 0 makes all clients equal.

    Each client has `min_size` rows and a log-normal part of the rest. Its `test_size` test rows are iid like its
    training rows, and may be shared with other clients.
    """
    require_sizes(config)
    _require_sigma(config.sigma)
    require_floor(config.min_size, config.own_size)
    require_rows(config, len(labels.train))
    _require_test_rows(config.test_size, len(labels.test))
    sizes_C = log_normal_sizes(config.all_clients, config.own_size, config.sigma, config.min_size, seed)
    order = stream(seed, "iid").permutation(len(labels.train))[: sizes_C.sum()].astype(np.int64)
    train, validation = separate(Shards(offsets(sizes_C), order), train_part(sizes_C, config))
    test = windows(len(labels.test), config.test_size, config.all_clients, seed)
    pools = Pools(labels.test, labels.num_classes, seed, "test")
    global_test = pools.balanced(config.global_test_size, stream(seed, "global test"))
    return Split(config.num_clients, config.num_unseen, train, validation, test, global_test)


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
