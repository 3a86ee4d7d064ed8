"""From a table of counts to a split: what splits whose clients differ in size and classes have in common.

Suffixes: C clients (those that train, then the unseen ones), K classes.
"""

import numpy as np

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Pools, capped_quotas, separate, stream
from fedmoe.partition.settings import SplitSizes
from fedmoe.partition.split import Indices, Split


def split_of_counts(
    counts_CK: Indices,
    train_sizes_C: Indices,
    pools: Pools,
    test_pools: Pools,
    config: SplitSizes,
    seed: int,
) -> Split:
    """Deals each client its rows, the first `train_sizes_C` for training and the rest for validation.

    Test rows follow the client's own class counts; a class that has too few test rows leaves its part to the client's
    other classes, and if they have too few as well the client's test set is smaller than `test_size`.
    """
    train, validation = separate(pools.deal(counts_CK), train_sizes_C)
    tests = [
        capped_quotas(config.test_size, counts_K, test_pools.supply_K, stream(seed, "test_size", c))
        for c, counts_K in enumerate(counts_CK)
    ]
    test = test_pools.mirror(np.stack(tests), seed, "own test")
    global_test = test_pools.balanced(config.global_test_size, stream(seed, "global test"))
    return Split(config.num_clients, config.num_unseen, train, validation, test, global_test)


def train_part(sizes_C: Indices, config: SplitSizes) -> Indices:
    """How many of a client's rows train: in the ratio of the two sizes, and one row to each at least if it has two."""
    exact = sizes_C * config.train_size / config.own_size
    return np.maximum(1, np.minimum(np.floor(exact + 0.5).astype(np.int64), sizes_C - 1))


def require_floor(min_size: int, mean_size: int) -> None:
    if min_size > mean_size:
        raise ConfigError(
            f"split.min_size={min_size} is above the mean of {mean_size} rows per client "
            "(split.train_size + split.validation_size). Lower min_size or raise a size."
        )
