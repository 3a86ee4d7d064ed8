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
from fedmoe.partition.by_label import OwnTests
from fedmoe.partition.quotas import (
    Labels,
    Shares,
    capped_quotas,
    quotas,
    require_rows,
    require_sizes,
    require_supply,
    stream,
)
from fedmoe.partition.settings import KLabelsSplit
from fedmoe.partition.split import Indices, Split


def split_by_k_labels(labels: Labels, config: KLabelsSplit, seed: int) -> Split:
    """Every client has the sizes exactly. Unseen clients hold sets of labels that no training client has ("new").

    The first `num_anchors` clients hold `labels_per_anchor` labels each, and no two of them share one.
    Training and validation rows are dealt without replacement, or with it (`replacement`, as in the paper): then each
    client draws alone, none of its rows twice. Test rows follow the client's labels.
    """
    require_sizes(config)
    _require_labels("labels_per_client", config.labels_per_client, labels.num_classes, config.train_size)
    _require_anchors(config, labels.num_classes)
    require_rows(config, len(labels.train), alone=config.replacement)
    pools, test_pools = labels.pools(seed)
    own_tests = OwnTests(test_pools, config)
    others = config.all_clients - config.num_anchors
    wanted = [config.labels_per_anchor] * config.num_anchors + [config.labels_per_client] * others
    num_new = config.num_unseen if config.unseen_labels == "new" else 0
    own = (config.train_size, config.validation_size)
    group_CK = label_groups(config, labels.num_classes, seed)
    train_CK, validation_CK = label_demands(wanted, own, pools.supply_K, config.num_anchors, num_new, seed, group_CK)
    test_CK = np.stack([_test_demand(own_tests, config, c, held_K, seed) for c, held_K in enumerate(train_CK > 0)])
    for part_CK in (train_CK, validation_CK):
        part_CK[config.labelled_clients :] = 0
    own_CK = train_CK + validation_CK
    remedy = "Lower one of the sizes or the number of clients"
    setting = f"split.train_size={config.train_size} and split.validation_size={config.validation_size}: the split"
    require_supply(own_CK.max(0) if config.replacement else own_CK.sum(0), pools.supply_K, setting, remedy)
    tested_CK = test_CK[[not config.validates(c) for c in range(config.all_clients)]]
    new = f" and split.unseen_test_size={config.unseen_test_size}" if config.unseen_test_size else ""
    setting = f"split.test_size={config.test_size}{new}"
    require_supply(tested_CK.max(0), own_tests.pools.supply_K, setting, "Lower split.test_size, or the latter")
    dealt = pools.mirror_two(train_CK, validation_CK, seed, "own rows") if config.replacement else None
    train, validation = dealt or pools.deal_two(train_CK, validation_CK)
    test, global_test = own_tests.draw(test_CK, seed), own_tests.draw_global(seed)
    return Split(
        config.num_clients, config.num_unseen, train, validation, test, global_test,
        num_validation=config.num_validation,
    )  # fmt: skip


def _test_demand(
    own_tests: OwnTests, config: KLabelsSplit, client: int, held_K: NDArray[np.bool_], seed: int
) -> Indices:
    size, rng = config.test_size_of(client), stream(seed, "test_size", client)
    if config.validates(client):
        return capped_quotas(size, held_K, own_tests.reserved.supply_K, rng)
    return quotas(size, held_K, rng)


def label_groups(config: KLabelsSplit, num_classes: int, seed: int) -> NDArray[np.bool_]:
    """(C, K): labels that a client may hold: those of its group, or all of them for an unseen client."""
    groups = config.label_groups
    may_hold_CK = np.ones((config.all_clients, num_classes), dtype=bool)
    if groups == 1:
        return may_hold_CK
    group_of_K = stream(seed, "label groups").permutation(num_classes) % groups
    trains = np.arange(config.num_clients)
    may_hold_CK[trains] = group_of_K == (trains % groups)[:, None]
    smallest = int(np.bincount(group_of_K, minlength=groups).min())
    anchors = -(-config.num_anchors // groups)
    for key, needed in (
        ("labels_per_client", config.labels_per_client), ("labels_per_anchor", anchors * config.labels_per_anchor),
    ):  # fmt: skip
        if needed > smallest:
            raise ConfigError(
                f"split.label_groups={groups} leaves {smallest} of {num_classes} labels to a group, but "
                f"split.{key}={getattr(config, key)} needs {needed} of them. Lower one of the two."
            )
    return may_hold_CK


def label_demands(
    wanted: list[int],
    sizes: tuple[int, int],
    supply_K: Indices,
    num_anchors: int,
    num_new: int,
    seed: int,
    may_hold_CK: NDArray[np.bool_] | None = None,
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
        order = order if may_hold_CK is None else order[may_hold_CK[client, order]]
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
