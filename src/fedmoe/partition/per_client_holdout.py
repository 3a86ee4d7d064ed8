"""Per-client holdout: clients that come with their rows keep some of them back for validation and test.

Made of whole arrays: 100,000 clients take a second or two. Suffixes: G groups of rows, C clients made of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Pools, offsets, stream
from fedmoe.partition.split import Indices, Shards, Split


@dataclass(frozen=True)
class HoldoutSizes:
    """How many of a client's rows train, validate and test.

    A size, where given, is an upper limit and comes before the share. Without a size, validation and test take their
    shares of the client's rows, and training takes what is left.
    A client with fewer rows than the sizes ask for has all parts reduced in proportion; no part that is asked for is
    empty.
    """

    train_size: int | None = None
    validation_size: int | None = None  # 0: no validation data
    test_size: int | None = None
    validation_share: float = 0.1
    test_share: float = 0.2
    min_size: int = 10  # groups with fewer rows are left out

    def __post_init__(self) -> None:
        for key, least in (("train_size", 1), ("validation_size", 0), ("test_size", 1), ("min_size", 1)):
            size = getattr(self, key)
            if size is not None and size < least:
                raise ConfigError(f"split.{key}={size} is below {least}. Set it to {least} or more.")
        if not (self.validation_share >= 0 and self.test_share > 0 and self.validation_share + self.test_share < 1):
            raise ConfigError(
                f"split.validation_share={self.validation_share} and split.test_share={self.test_share} leave nothing "
                "to train or to test on. Set test_share above 0, and both together below 1."
            )
        if self.min_size < 2 + self.has_validation:
            raise ConfigError(
                f"split.min_size={self.min_size} is too few rows for training, test and validation data to have one "
                f"each. Set it to {2 + self.has_validation} or more."
            )

    @property
    def has_validation(self) -> bool:
        return self.validation_share > 0 if self.validation_size is None else self.validation_size > 0

    def sizes(self, rows_C: Indices) -> tuple[Indices, Indices, Indices]:
        """Training, validation and test rows of clients with so many rows."""
        validation = _wish(self.validation_size, self.validation_share, rows_C)
        test = _wish(self.test_size, self.test_share, rows_C)
        train = rows_C - validation - test if self.train_size is None else np.full(len(rows_C), float(self.train_size))
        shrink = np.minimum(1, rows_C / (np.maximum(train, 1) + validation + test))
        validation_C = _whole(validation * shrink, self.has_validation, rows_C - 2)
        test_C = _whole(test * shrink, True, rows_C - 1 - validation_C)
        left_C = rows_C - validation_C - test_C
        return left_C if self.train_size is None else np.minimum(self.train_size, left_C), validation_C, test_C


def _wish(size: int | None, share: float, rows_C: Indices) -> NDArray[np.float64]:
    return np.full(len(rows_C), float(size)) if size is not None else (share * rows_C).astype(np.float64)


def _whole(exact_C: NDArray[np.float64], asked_for: bool, most_C: Indices) -> Indices:
    return np.minimum(np.maximum(np.floor(exact_C + 0.5).astype(np.int64), int(asked_for)), most_C)


def split_by_client(
    groups: Shards,
    test_labels: NDArray[np.generic],
    num_classes: int,
    holdout: HoldoutSizes,
    *,
    num_clients: int | None = None,
    num_unseen: int = 0,
    global_test_size: int,
    seed: int,
) -> Split:
    """Clients in the order of their groups; which of them are used, and which are unseen, goes at random.

    Own test data are rows of the training part that the client neither trains nor validates on. The global test set
    comes from the test part, with all classes alike as far as they reach.
    """
    able = np.flatnonzero(groups.sizes >= holdout.min_size)
    chosen_C = _choose(able, len(groups.sizes), holdout.min_size, num_clients, num_unseen, seed)
    draws = stream(seed, "own rows").random(len(groups.rows))
    owners = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    shuffled = groups.rows[np.lexsort((draws, owners))]
    begin_C = groups.offsets[chosen_C]
    parts = []
    for size_C in holdout.sizes(groups.sizes[chosen_C]):
        at = offsets(size_C)
        parts.append(Shards(at, shuffled[np.repeat(begin_C - at[:-1], size_C) + np.arange(at[-1])]))
        begin_C = begin_C + size_C
    train, validation, test = parts
    global_test = _global_rows(test_labels, num_classes, global_test_size, seed)
    return Split(len(chosen_C) - num_unseen, num_unseen, train, validation, test, global_test, own_test="train")


def _choose(able: Indices, known: int, min_size: int, num_clients: int | None, num_unseen: int, seed: int) -> Indices:
    """Group numbers: the clients that train in order, then the unseen ones in order."""
    training = len(able) - num_unseen if num_clients is None else num_clients
    if num_unseen < 0 or training < 1 or training + num_unseen > len(able):
        wish = "all" if num_clients is None else num_clients
        raise ConfigError(
            f"split.num_clients={wish} and split.num_unseen={num_unseen} cannot be had: {len(able)} of {known} clients "
            f"have split.min_size={min_size} rows or more. Lower one of them, with at least one client to train."
        )
    drawn = able[stream(seed, "which clients").permutation(len(able))]
    return np.concatenate([np.sort(drawn[:training]), np.sort(drawn[training : training + num_unseen])])


def _global_rows(labels: NDArray[np.generic], num_classes: int, size: int, seed: int) -> Indices:
    """Numbers that are no classes (regression) cannot be balanced: then any rows."""
    if size < 0 or (size > 0 and not len(labels)):
        raise ConfigError(
            f"split.global_test_size={size} cannot be drawn from {len(labels)} test rows. Set it to 0 for no global "
            "test, or use a data set with a test part."
        )
    rng = stream(seed, "global test")
    if np.issubdtype(labels.dtype, np.integer) and num_classes > 0:
        return Pools(labels.astype(np.int64), num_classes, seed, "test").balanced_if_possible(size, rng)
    return np.sort(rng.permutation(len(labels))[:size]).astype(np.int64)
