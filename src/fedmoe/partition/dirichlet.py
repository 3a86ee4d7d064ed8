"""Label skew by Dirichlet: for each class, the parts that go to the clients are drawn from Dir(alpha).

Small alpha: few clients hold a class. Large alpha: iid. Sizes differ between clients (Yurochkin et al. 2019). With
`equal_sizes` it is the clients that draw, each its chances over classes, and all have the same size (Hsu et al. 2019).
Its loops over clients suit 10,000 of them.
Suffixes: C clients (those that train, then the unseen ones), K classes.
"""

import numpy as np

from fedmoe.errors import ConfigError
from fedmoe.partition.by_label import require_floor, split_of_counts, train_part
from fedmoe.partition.pachinko import client_counts
from fedmoe.partition.quotas import (
    Labels,
    proportions,
    quotas,
    require_concentration,
    require_rows,
    require_sizes,
    require_supply,
    stream,
)
from fedmoe.partition.settings import DirichletSplit
from fedmoe.partition.split import Indices, Split


def split_by_dirichlet(labels: Labels, config: DirichletSplit, seed: int) -> Split:
    """Sizes are means over clients: (train_size + validation_size) rows each on average, at least `min_size`.

    A client's rows go to training and validation in the ratio of the two sizes, at least one to each if it has two.
    Its test rows follow its own class counts; a class that has too few test rows leaves its part to the client's
    other classes, and if they have too few as well the client's test set is smaller than `test_size`.
    """
    size, all_clients, alpha = config.own_size, config.all_clients, config.alpha
    require_sizes(config)
    require_concentration("alpha", alpha)
    require_floor(config.min_size, size)
    if config.replacement and not config.equal_sizes:
        raise ConfigError(
            "split.replacement=true lets each client draw for itself, so clients are of one size: set "
            "split.equal_sizes = true too, or leave replacement away."
        )
    require_rows(config, len(labels.train), alone=config.replacement)
    pools, test_pools = labels.pools(seed)
    if config.equal_sizes:
        counts_CK = client_parts(size, pools.supply_K, all_clients, alpha, seed, alone=config.replacement)
    else:
        total_K = quotas(all_clients * size, np.ones(labels.num_classes), stream(seed, "class totals"))
        setting = f"split.train_size={config.train_size} with {all_clients} clients"
        remedy = "Classes are used alike: lower a size or the number of clients"
        require_supply(total_K, pools.supply_K, setting, remedy)
        counts_CK = raise_to_floor(class_parts(total_K, all_clients, alpha, seed), config.min_size)
    return split_of_counts(counts_CK, train_part(counts_CK.sum(1), config), pools, test_pools, config, seed)


def class_parts(total_K: Indices, num_clients: int, alpha: float, seed: int) -> Indices:
    """How many rows of each class go to each client (C, K)."""
    parts = []
    for label, total in enumerate(total_K):
        rng = stream(seed, "dirichlet", label)
        parts.append(quotas(int(total), proportions(num_clients, alpha, rng), rng))
    return np.stack(parts, axis=1)


def client_parts(
    size: int, supply_K: Indices, num_clients: int, alpha: float, seed: int, *, alone: bool = False
) -> Indices:
    """How many rows of each class go to each client (C, K), `size` to each, none of them twice unless each is `alone`.

    A class without rows left leaves its chance to the others. Who draws when goes at random: else the clients numbered
    last, the unseen ones, would be those that get what is left over.
    """
    counts_CK = np.zeros((num_clients, len(supply_K)), dtype=np.int64)
    one_branch = [np.arange(len(supply_K))]
    for client in stream(seed, "order of clients").permutation(num_clients):
        left_K = supply_K if alone else supply_K - counts_CK.sum(0)
        counts_CK[client] = client_counts(size, one_branch, left_K, 1.0, alpha, stream(seed, "class chances", client))
    return counts_CK


def raise_to_floor(counts_CK: Indices, min_size: int) -> Indices:
    """Clients with fewer than `min_size` rows take rows, one by one, from the largest class of the largest client.

    Ends because every step lowers the total shortage by one, and while there is a shortage the largest client is
    above the floor (the mean is not below it).
    """
    counts = counts_CK.copy()
    sizes_C = counts.sum(1)
    for poor in np.flatnonzero(sizes_C < min_size):
        while sizes_C[poor] < min_size:
            rich = int(np.argmax(sizes_C))
            label = int(np.argmax(counts[rich]))
            counts[rich, label] -= 1
            counts[poor, label] += 1
            sizes_C[rich] -= 1
            sizes_C[poor] += 1
    return counts
