"""Pachinko allocation: label skew along a tree of coarse and fine labels (Reddi et al. 2020, CIFAR-100).

Each client draws chances over coarse labels from Dir(alpha), and within each of them over its fine labels from
Dir(beta). Its examples are drawn one after the other, without replacement over all clients: a fine label without rows
left is taken out of its branch, a branch without rows left out of the tree, and the chances of the others grow alike.
Its loops over clients suit 10,000 of them. Suffixes: C clients (those that train, then the unseen ones), K classes.
"""

import numpy as np
from numpy.typing import NDArray

from fedmoe.errors import ConfigError
from fedmoe.partition.by_label import split_of_counts
from fedmoe.partition.quotas import (
    Labels,
    Shares,
    proportions,
    require_concentration,
    require_rows,
    require_sizes,
    stream,
)
from fedmoe.partition.settings import PachinkoSplit
from fedmoe.partition.split import Indices, Split


def split_by_pachinko(labels: Labels, train_coarse: NDArray[np.int64], config: PachinkoSplit, seed: int) -> Split:
    """Every client has (train_size + validation_size) rows; its test rows follow its own counts of fine labels."""
    require_sizes(config)
    require_concentration("alpha", config.alpha)
    require_concentration("beta", config.beta)
    require_rows(config, len(labels.train))
    pools, test_pools = labels.pools(seed)
    branches = branches_of(labels.train, train_coarse)
    left_K, counts = pools.supply_K.copy(), []
    for client in range(config.all_clients):
        rng = stream(seed, "pachinko", client)
        counts.append(client_counts(config.own_size, branches, left_K, config.alpha, config.beta, rng))
        left_K -= counts[-1]
    train_C = np.full(len(counts), config.train_size, dtype=np.int64)
    return split_of_counts(np.stack(counts), train_C, pools, test_pools, config, seed)


def branches_of(labels: NDArray[np.int64], coarse: NDArray[np.int64]) -> list[Indices]:
    """The fine labels of each coarse one.

    >>> branches_of(np.array([0, 2, 1, 2]), np.array([7, 5, 7, 5]))
    [array([2]), array([0, 1])]
    """
    pairs = np.unique(np.stack([coarse, labels], axis=1), axis=0)
    fine, times = np.unique(pairs[:, 1], return_counts=True)
    if times.max(initial=1) > 1:
        raise ConfigError(
            f"split.kind='pachinko' needs a tree, but rows of class {fine[times.argmax()]} have several values of the "
            "field 'coarse'. Give every class one coarse label, or choose another kind."
        )
    return [pairs[pairs[:, 0] == branch, 1].astype(np.int64) for branch in np.unique(pairs[:, 0])]


def client_counts(
    size: int, branches: list[Indices], supply_K: Indices, alpha: float, beta: float, rng: np.random.Generator
) -> Indices:
    """How many rows of each class one client draws, `size` together.

    Ends because a pass that leaves something to draw has emptied a branch.
    """
    chances = proportions(len(branches), alpha, rng)
    chances_within = [proportions(len(fine), beta, rng) for fine in branches]
    counts_K = np.zeros(len(supply_K), dtype=np.int64)
    while (left := size - int(counts_K.sum())) > 0:
        room_K = supply_K - counts_K
        room = np.array([room_K[fine].sum() for fine in branches])
        for branch, wanted in enumerate(_draw(left, chances, room, rng)):
            fine = branches[branch]
            while (wanted := min(wanted, room_K[fine].sum())) > 0:
                drawn = np.minimum(_draw(wanted, chances_within[branch], room_K[fine], rng), room_K[fine])
                counts_K[fine] += drawn
                room_K[fine] -= drawn
                wanted -= drawn.sum()
    return counts_K


def _draw(total: int, chances: Shares, room: Indices, rng: np.random.Generator) -> Indices:
    """`total` draws among what has room; where all of that has chance 0 in floating point, evenly."""
    weights = np.where(room > 0, chances, 0)
    if not weights.sum() > 0:
        weights = (room > 0).astype(np.float64)
    return rng.multinomial(total, weights / weights.sum())
