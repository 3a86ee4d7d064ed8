"""From a table of counts to a split: what splits whose clients differ in size and classes have in common.

Suffixes: C clients (those that train, then the unseen ones), K classes.
"""

import numpy as np

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Pools, capped_quotas, separate, stream
from fedmoe.partition.settings import NewClientSizes, SplitSizes
from fedmoe.partition.split import Indices, Shards, Split

RESERVED = 0.2  # of the test part, for clients by which settings are chosen


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
    own = OwnTests(test_pools, config)
    tests = [
        capped_quotas(own.size_of(c), counts_K, own.pools_of(c).supply_K, stream(seed, "test_size", c))
        for c, counts_K in enumerate(counts_CK)
    ]
    held_CK, train_sizes_C = counts_CK.copy(), train_sizes_C.copy()
    held_CK[config.labelled_clients :], train_sizes_C[config.labelled_clients :] = 0, 0
    alone = isinstance(config, NewClientSizes) and config.replacement
    dealt = pools.mirror(held_CK, seed, "own rows") if alone else pools.deal(held_CK)
    train, validation = separate(dealt, train_sizes_C)
    test, global_test = own.draw(np.stack(tests), seed), own.draw_global(seed)
    return Split(
        config.num_clients, config.num_unseen, train, validation, test, global_test, num_validation=own.num_validation
    )


class OwnTests:
    """The test part: rows of clients by which settings are chosen are nobody else's, also not of the global test."""

    def __init__(self, pools: Pools, config: SplitSizes) -> None:
        self.config, self.new = config, config if isinstance(config, NewClientSizes) else None
        self.num_validation = self.new.num_validation if self.new else 0
        if not 0 <= self.num_validation <= config.num_unseen:
            raise ConfigError(
                f"split.num_validation={self.num_validation} is above split.num_unseen={config.num_unseen}: they are "
                "some of the unseen clients. Raise num_unseen or lower num_validation."
            )
        self.reserved, self.pools = pools.parted(RESERVED) if self.num_validation else (pools, pools)

    def size_of(self, client: int) -> int:
        return self.new.test_size_of(client) if self.new else self.config.test_size

    def pools_of(self, client: int) -> Pools:
        return self.reserved if self.new and self.new.validates(client) else self.pools

    def draw(self, demand_CK: Indices, seed: int) -> Shards:
        return Shards.from_lists(
            [self.pools_of(c).draw(demand_K, stream(seed, "own test", c)) for c, demand_K in enumerate(demand_CK)]
        )

    def draw_global(self, seed: int) -> Indices:
        return self.pools.balanced(self.config.global_test_size, stream(seed, "global test"))


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
