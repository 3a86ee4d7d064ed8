"""Whole numbers out of shares, and rows out of classes: what every split by label is made of.

Suffixes: C clients, K classes.
"""

import copy
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedmoe.errors import ConfigError
from fedmoe.partition.settings import SplitSizes
from fedmoe.partition.split import Indices, Shards
from fedmoe.streams import numpy_stream

Shares = NDArray[np.float64]
SIZES = (
    "num_clients", "num_unseen", "train_size", "validation_size", "test_size", "global_test_size", "min_size",
)  # fmt: skip


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A stream of its own for each purpose and client: what one draws never shifts what another draws."""
    return numpy_stream(seed, "split", purpose, *ids)


def quotas(total: int, shares: ArrayLike, rng: np.random.Generator) -> Indices:
    """`total` apportioned by largest remainder: sums exactly, each within one of its exact share; ties go at random.

    >>> quotas(10, [0.5, 0.31, 0.19], np.random.default_rng(0))
    array([5, 3, 2])
    """
    weights = np.asarray(shares, dtype=np.float64)
    exact = np.round(total * (weights / weights.sum()), 9)  # rounded, so that equal shares do tie
    whole: Indices = np.floor(exact).astype(np.int64)
    left = total - int(whole.sum())
    by_remainder = np.lexsort((rng.random(len(exact)), whole - exact))
    whole[by_remainder[:left]] += 1
    return whole


def capped_quotas(total: int, shares: ArrayLike, caps: Indices, rng: np.random.Generator) -> Indices:
    """Quotas that exceed no cap. What a full class cannot give, the other classes with a share do, while they can."""
    weights = np.array(shares, dtype=np.float64)
    taken = np.zeros(len(caps), dtype=np.int64)
    while (left := total - int(taken.sum())) > 0:
        weights[taken >= caps] = 0
        if not weights.sum() > 0:
            break
        taken = np.minimum(taken + quotas(left, weights, rng), caps)
    return taken


def proportions(number: int, alpha: float, rng: np.random.Generator) -> Shares:
    """Dir(alpha); where alpha is too near 0 for floating point, its limit: all in one place."""
    drawn = rng.dirichlet(np.full(number, alpha))
    if np.isfinite(drawn).all() and drawn.sum() > 0:
        return drawn
    limit = np.zeros(number)
    limit[rng.integers(number)] = 1
    return limit


class Pools:
    """The rows of each class in a random order fixed by (seed, purpose), ready to be dealt out."""

    def __init__(self, labels: NDArray[np.int64], num_classes: int, seed: int, purpose: str) -> None:
        rows = np.argsort(labels, kind="stable")
        self.supply_K = np.bincount(labels, minlength=num_classes)[:num_classes].astype(np.int64)
        self.rows_K = np.split(rows, np.cumsum(self.supply_K))[:num_classes]
        for label, pool in enumerate(self.rows_K):
            stream(seed, purpose, label).shuffle(pool)
        self.place = stream(seed, f"{purpose} order").random(len(labels))  # where a row stands within its client

    def deal(self, demand_CK: Indices) -> Shards:
        """Rows by class to each client, none of them twice; a client's rows depend on the clients before it only."""
        owners_C = np.arange(len(demand_CK))
        owner = np.concatenate([np.repeat(owners_C, demand) for demand in demand_CK.T])
        rows = np.concatenate([pool[:used] for pool, used in zip(self.rows_K, demand_CK.sum(0), strict=True)])
        return Shards(offsets(demand_CK.sum(1)), rows[np.lexsort((self.place[rows], owner))])

    def deal_two(self, first_CK: Indices, second_CK: Indices) -> tuple[Shards, Shards]:
        """The same for two shards of each client; who comes first takes both."""
        by_turns = np.stack([first_CK, second_CK], axis=1).reshape(-1, len(self.rows_K))
        dealt = self.deal(by_turns)
        return separate(dealt._replace(offsets=dealt.offsets[::2]), first_CK.sum(1))

    def mirror(self, demand_CK: Indices, seed: int, purpose: str) -> Shards:
        """Rows by class to each client, none twice within a client; clients draw alone, so they may share rows."""
        lists = [self.draw(demand_K, stream(seed, purpose, client)) for client, demand_K in enumerate(demand_CK)]
        return Shards.from_lists(lists)

    def mirror_two(self, first_CK: Indices, second_CK: Indices, seed: int, purpose: str) -> tuple[Shards, Shards]:
        """The same for two shards of each client, which share no row."""
        lists: tuple[list[Indices], list[Indices]] = ([], [])
        for client, demand_2K in enumerate(np.stack([first_CK, second_CK], axis=1)):
            rng = stream(seed, purpose, client)
            drawn_K = [
                rng.choice(pool, n, replace=False) for pool, n in zip(self.rows_K, demand_2K.sum(0), strict=True)
            ]
            for part, rows_K in zip(lists, zip(*map(_cut, drawn_K, demand_2K[0]), strict=True), strict=True):
                part.append(rng.permutation(np.concatenate(rows_K)))
        return Shards.from_lists(lists[0]), Shards.from_lists(lists[1])

    def parted(self, share: float) -> tuple["Pools", "Pools"]:
        """Two pools without a common row: this share of each class, rounded down, and the rest."""
        parts = (copy.copy(self), copy.copy(self))
        cuts_K = np.floor(self.supply_K * share).astype(np.int64)
        pairs = [_cut(pool, cut) for pool, cut in zip(self.rows_K, cuts_K, strict=True)]
        for place, part in enumerate(parts):
            part.rows_K = [pair[place] for pair in pairs]
            part.supply_K = np.array([len(rows) for rows in part.rows_K], dtype=np.int64)
        return parts

    def draw(self, demand_K: Indices, rng: np.random.Generator) -> Indices:
        drawn = [rng.choice(self.rows_K[k], demand_K[k], replace=False) for k in np.flatnonzero(demand_K)]
        return rng.permutation(np.concatenate([*drawn, np.zeros(0, dtype=np.int64)]))

    def balanced(self, total: int, rng: np.random.Generator) -> Indices:
        """The same number of rows of every class, give or take one, in order."""
        demand_K = quotas(total, np.ones(len(self.rows_K)), rng)
        require_supply(demand_K, self.supply_K, f"split.global_test_size={total}", "Lower split.global_test_size")
        return np.sort(self.deal(demand_K[None]).rows)

    def balanced_if_possible(self, total: int, rng: np.random.Generator) -> Indices:
        """As balanced as the labels allow, and no more than all rows."""
        demand_K = capped_quotas(total, np.ones(len(self.rows_K)), self.supply_K, rng)
        return np.sort(self.deal(demand_K[None]).rows)


class Labels(NamedTuple):
    """Of the data set, row by row."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    num_classes: int

    def pools(self, seed: int) -> tuple[Pools, Pools]:
        return Pools(self.train, self.num_classes, seed, "train"), Pools(self.test, self.num_classes, seed, "test")


def _cut(rows: Indices, at: int) -> tuple[Indices, Indices]:
    return rows[:at], rows[at:]


def offsets(sizes: Indices) -> Indices:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def separate(shards: Shards, first_C: Indices) -> tuple[Shards, Shards]:
    """Each client's shard in two: its first rows, as many as `first_C` says, and the rest."""
    place = np.arange(len(shards.rows)) - np.repeat(shards.offsets[:-1], shards.sizes)
    in_first = place < np.repeat(first_C, shards.sizes)
    first = Shards(offsets(first_C), shards.rows[in_first])
    return first, Shards(offsets(shards.sizes - first_C), shards.rows[~in_first])


def require_sizes(config: SplitSizes) -> None:
    for name in SIZES:
        size, least = getattr(config, name, 1), 0 if name == "num_unseen" else 1
        if size < least:
            raise ConfigError(f"split.{name}={size} is below {least}. Set it to {least} or more.")


def require_concentration(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(
            f"split.{key}={value} is not a positive number, as a Dirichlet distribution needs. "
            "Set it between 0.01 (nearly all in one place) and 100 (nearly even)."
        )


def require_rows(config: SplitSizes, supply: int, *, alone: bool = False) -> None:
    """Checked on the numbers alone, so an absurd setting is refused before it takes memory.

    Clients that draw `alone` may hold the same rows, so each needs no more than its own.
    """
    demand = (1 if alone else config.labelled_clients) * config.own_size
    if demand > supply:
        raise ConfigError(
            f"split.num_clients={config.num_clients} and split.num_unseen={config.num_unseen} with "
            f"split.train_size={config.train_size} and split.validation_size={config.validation_size} rows each need "
            f"{demand} training examples, but the data set has {supply}. Lower one of them."
        )


def require_supply(demand_K: Indices, supply_K: Indices, setting: str, remedy: str) -> None:
    """Names the class that is shortest, as no class may be drawn from beyond its rows."""
    worst = int(np.argmax(demand_K - supply_K))
    if demand_K[worst] > supply_K[worst]:
        raise ConfigError(
            f"{setting} needs {demand_K[worst]} examples of class {worst}, but there are {supply_K[worst]}. {remedy}."
        )
