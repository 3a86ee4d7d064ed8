"""Label skew by number: each client holds k labels, evenly (Dun et al. 2023: 4 of 10).

Labels are dealt so that all are used alike, in proportion to the rows they have: the data can be used up, whatever is
drawn, where the sizes are multiples of k, and nearly where they are not. Its loops over clients suit 10,000 of them.
Suffixes: C clients (anchors first, then others that train, then the unseen ones), K classes.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Labels, Shares, quotas, require_rows, require_sizes, require_supply, stream
from fedmoe.partition.settings import KLabelsSplit
from fedmoe.partition.split import Indices, Split


def split_by_k_labels(labels: Labels, config: KLabelsSplit, seed: int) -> Split:
    """Every client has the sizes exactly. Unseen clients hold sets of labels that no training client has ("new").

    The first `num_anchors` clients hold `labels_per_anchor` labels each, and no two of them share one.
    Training and validation rows are dealt without replacement (the paper: with); test rows follow the client's labels.
    """
    require_sizes(config)
    _require_labels("labels_per_client", config.labels_per_client, labels.num_classes, config.train_size)
    _require_anchors(config, labels.num_classes)
    require_rows(config, len(labels.train))
    pools, test_pools = labels.pools(seed)
    others = config.all_clients - config.num_anchors
    wanted = [config.labels_per_anchor] * config.num_anchors + [config.labels_per_client] * others
    num_new = config.num_unseen if config.unseen_labels == "new" else 0
    own = (config.train_size, config.validation_size)
    train_CK, validation_CK = label_demands(wanted, own, pools.supply_K, config.num_anchors, num_new, seed)
    test_CK = np.stack(
        [quotas(config.test_size, held_K, stream(seed, "test_size", c)) for c, held_K in enumerate(train_CK > 0)]
    )
    remedy = "Lower one of the sizes or the number of clients"
    setting = f"split.train_size={config.train_size} and split.validation_size={config.validation_size}: the split"
    require_supply((train_CK + validation_CK).sum(0), pools.supply_K, setting, remedy)
    require_supply(test_CK.max(0), test_pools.supply_K, f"split.test_size={config.test_size}", "Lower split.test_size")
    train, validation = pools.deal_two(train_CK, validation_CK)
    test = test_pools.mirror(test_CK, seed, "own test")
    global_test = test_pools.balanced(config.global_test_size, stream(seed, "global test"))
    return Split(config.num_clients, config.num_unseen, train, validation, test, global_test)


def label_demands(
    wanted: list[int], sizes: tuple[int, int], supply_K: Indices, num_anchors: int, num_new: int, seed: int
) -> Indices:
    """Rows by (training or validation, client, class): each client spreads its sizes evenly over `wanted` labels.

    A client takes the labels used least, ties at random; anchors take fresh ones; the last `num_new` clients take
    the first set of labels in that order that none of the others has.
    """
    demand = np.zeros((len(sizes), len(wanted), len(supply_K)), dtype=np.int64)
    used_K = np.zeros(len(supply_K), dtype=np.int64)
    held: set[tuple[int, ...]] = set()
    for client, num_labels in enumerate(wanted):
        lot_K = stream(seed, "labels", client).random(len(supply_K))
        is_used_K = (used_K > 0) & (client < num_anchors)
        order = np.lexsort((lot_K, _share_in_use(used_K + sum(sizes) / num_labels, supply_K), is_used_K))
        sets = itertools.combinations(order.tolist(), num_labels)
        if client < len(wanted) - num_new:
            labels = next(sets)
            held.add(tuple(sorted(labels)))
        else:
            labels = _first_new(sets, held, num_new, num_labels, len(supply_K))
        for place, size in enumerate(sizes):
            demand[place, client, labels] = size // num_labels
            least = np.lexsort((lot_K, _share_in_use(used_K, supply_K)))
            demand[place, client, least[np.isin(least, labels)][: size % num_labels]] += 1
            used_K += demand[place, client]
    return demand


def _share_in_use(used_K: NDArray[np.number[Any]], supply_K: Indices) -> Shares:
    return np.where(supply_K > 0, used_K / np.maximum(supply_K, 1), np.inf).round(9)


def _first_new(
    sets: Iterator[tuple[int, ...]], held: set[tuple[int, ...]], num_unseen: int, num_labels: int, num_classes: int
) -> tuple[int, ...]:
    """Looks at one set more than are held, at most."""
    for labels in sets:
        if tuple(sorted(labels)) not in held:
            return labels
    raise ConfigError(
        f"split.num_unseen={num_unseen} clients are to hold labels together that no training client does, but all "
        f"{math.comb(num_classes, num_labels)} sets of split.labels_per_client={num_labels} of {num_classes} labels "
        "are taken. Change labels_per_client, lower num_clients, or set unseen_labels='any'."
    )


def _require_labels(key: str, number: int, num_classes: int, train_size: int) -> None:
    if not 1 <= number <= num_classes:
        raise ConfigError(
            f"split.{key}={number} is outside [1, {num_classes}]: the data set has {num_classes} classes. "
            "Choose a number in that range."
        )
    if train_size < number:
        raise ConfigError(
            f"split.{key}={number} is above split.train_size={train_size}, so a label would have no training row. "
            f"Lower {key} or raise train_size."
        )


def _require_anchors(config: KLabelsSplit, num_classes: int) -> None:
    num_anchors, labels = config.num_anchors, config.labels_per_anchor
    if not 0 <= num_anchors <= config.num_clients:
        raise ConfigError(
            f"split.num_anchors={num_anchors} is outside [0, {config.num_clients}]: anchors are among the clients that "
            "train. Choose a number in that range."
        )
    if num_anchors:
        _require_labels("labels_per_anchor", labels, num_classes, config.train_size)
        if num_anchors * labels > num_classes:
            raise ConfigError(
                f"split.num_anchors={num_anchors} with split.labels_per_anchor={labels} need {num_anchors * labels} "
                f"labels, as anchors share none, but the data set has {num_classes}. Lower one of them."
            )
