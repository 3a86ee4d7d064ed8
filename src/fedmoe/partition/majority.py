"""Label skew by majority: two classes hold a share p of a client's examples, the others share the rest evenly.

Its loops over clients suit 10,000 of them. Suffixes: C clients (those that train, then the unseen ones), K classes.
"""

import numpy as np

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Labels, Shares, quotas, require_rows, require_sizes, require_supply, stream
from fedmoe.partition.settings import MajoritySplit, Pairs
from fedmoe.partition.split import Indices, Split


def split_by_majority(labels: Labels, config: MajoritySplit, seed: int) -> Split:
    """Each client's two majority classes hold `share` (p) of its rows, p/2 each; p = 2/K is iid.

    Training and validation rows are dealt without replacement over all clients. Test rows follow the client's own
    distribution and may be shared between clients; the global test set has all classes alike.
    """
    num_clients, num_unseen, num_classes = config.num_clients, config.num_unseen, labels.num_classes
    require_sizes(config)
    _require_share(config.share, num_classes)
    require_rows(config, len(labels.train))
    pairs_C2 = majority_pairs(num_clients, num_unseen, num_classes, config.pairs, seed)
    shares_CK = _client_shares(pairs_C2, config.share, num_classes)
    train_CK, validation_CK, test_CK = (
        _demand(getattr(config, size), shares_CK, size, seed) for size in ("train_size", "validation_size", "test_size")
    )
    pools, test_pools = labels.pools(seed)
    _require_classes(train_CK + validation_CK, pools.supply_K, config.share)
    require_supply(test_CK.max(0), test_pools.supply_K, f"split.test_size={config.test_size}", "Lower split.test_size")
    train, validation = pools.deal_two(train_CK, validation_CK)
    test = test_pools.mirror(test_CK, seed, "own test")
    global_test = test_pools.balanced(config.global_test_size, stream(seed, "global test"))
    return Split(num_clients, num_unseen, train, validation, test, global_test)


def majority_pairs(num_clients: int, num_unseen: int, num_classes: int, pairs: Pairs, seed: int) -> Indices:
    """Two classes for each client (C, 2).

    Disjoint: no two clients that train share a class. Unseen clients take pairs that are left, then any that is used.
    """
    clients = range(num_clients + num_unseen)
    if pairs == "overlapping":
        return np.stack([stream(seed, "pair", c).choice(num_classes, 2, replace=False) for c in clients])
    if 2 * num_clients > num_classes:
        raise ConfigError(
            f"split.num_clients={num_clients} with split.pairs='disjoint' needs {2 * num_clients} classes, but the "
            f"data set has {num_classes}. Set num_clients to {num_classes // 2} at most, or pairs to 'overlapping'."
        )
    deck = stream(seed, "pairs").permutation(num_classes)[: num_classes // 2 * 2].reshape(-1, 2)
    chosen = [c if c < len(deck) else int(stream(seed, "pair", c).integers(len(deck))) for c in clients]
    return deck[chosen].astype(np.int64)


def _require_share(share: float, num_classes: int) -> None:
    if num_classes < 2:
        raise ConfigError(f"A split by majority needs two classes or more, but the data set has {num_classes}.")
    if not 2 / num_classes - 1e-9 <= share <= 1:
        raise ConfigError(
            f"split.share={share} is outside [{2 / num_classes:g}, 1]: two of {num_classes} classes hold at least "
            f"2/{num_classes} of the examples (iid) and at most all. Choose a share in that range."
        )


def _require_classes(demand_CK: Indices, supply_K: Indices, share: float) -> None:
    setting = f"split.num_clients, split.train_size and split.validation_size with split.share={share}: the split"
    remedy = "Lower one of the sizes or the number of clients, bring the share nearer to iid, or choose another seed"
    require_supply(demand_CK.sum(0), supply_K, setting, remedy)


def _client_shares(pairs_C2: Indices, share: float, num_classes: int) -> Shares:
    minority = (1 - share) / (num_classes - 2) if num_classes > 2 else 0.0
    shares_CK = np.full((len(pairs_C2), num_classes), minority)
    np.put_along_axis(shares_CK, pairs_C2, share / 2, axis=1)
    return shares_CK


def _demand(size: int, shares_CK: Shares, purpose: str, seed: int) -> Indices:
    return np.stack([quotas(size, shares_K, stream(seed, purpose, c)) for c, shares_K in enumerate(shares_CK)])
