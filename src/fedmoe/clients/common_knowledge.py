"""What every client must know of the user's own data: how many classes, ids and values of side information there are.

It is taken from rows that may be shared, never from opted-out records or unseen clients: else a model's shape, which is
sent, would depend on them.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.clients.federation import Records, keep
from fedmoe.core_types import Examples
from fedmoe.errors import DataError


class OwnClient(NamedTuple):
    name: str
    records: Records
    test_opted_in: Tensor  # (N,) bool: test rows that may go into a test set for everyone


def shared_rows(sharing: Sequence[OwnClient]) -> Iterator[Examples]:
    """What may shape a message: opted-in training and validation rows of clients that take part."""
    for one in sharing:
        yield keep(one.records.train, one.records.train_opted_in)
        yield keep(one.records.validation, one.records.validation_opted_in)


def count_classes(
    declared: int | None, sharing: Sequence[OwnClient], given_test: Examples | None, parts: Mapping[str, Examples]
) -> int:
    if declared is not None:
        return declared  # every label was compared with it when it was read
    labels = torch.cat([rows.y for rows in shared_rows(sharing)] + ([] if given_test is None else [given_test.y]))
    known = int(labels.max()) + 1
    for whose, part in parts.items():
        if len(part.y) and int(part.y.max()) >= known:
            raise DataError(beyond(whose, "a label", int(part.y.max()), known, "num_classes={}"))
    if int(labels.min()) > 0:
        lowest = int(labels.min())
        raise DataError(
            f"the labels go from {lowest} to {known - 1}, so class 0 has no row. Number the classes from 0 "
            f"(y - {lowest}), or, if lower ones are only missing here, declare num_classes={known}."
        )
    return known


def count_side_values(
    declared: Mapping[str, int], sharing: Sequence[OwnClient], parts: Mapping[str, Examples]
) -> dict[str, int]:
    """How many values each piece of side information has; whatever is trained on must have all of them."""
    trained = {whose: part for whose, part in parts.items() if not whose.endswith(", test")}
    first, known = next((whose, sorted(part.extra)) for whose, part in trained.items())
    for whose, part in trained.items():
        if sorted(part.extra) != known:
            raise DataError(
                f"{whose} has side information {sorted(part.extra)}, but {first} has {known}. "
                "Give all training and validation rows the same."
            )
    require_known("side_values", declared, known)
    shared = list(shared_rows(sharing))
    found = {kind: int(torch.cat([rows.extra[kind] for rows in shared]).max()) + 1 for kind in known}
    values = {**found, **declared}
    for whose, part in trained.items():
        for kind in known:
            if not len(part.y) or (most := int(part.extra[kind].max())) < values[kind]:
                continue
            if kind in declared:
                raise DataError(f"{whose} has {kind!r} {most}, beyond side_values={dict(declared)}. Declare more.")
            raise DataError(beyond(whose, f"{kind!r}", most, values[kind], f"side_values={{{{{kind!r}: {{}}}}}}"))
    return values


def beyond(whose: str, what: str, value: int, known: int, declare: str, needed: int | None = None) -> str:
    return (
        f"{whose} has {what} {value}, but the rows that may be shared (opted in, for training or validation, of "
        f"clients that take part) go up to {known - 1}, and no other row may shape the model that is sent. "
        f"Declare {declare.format(value + 1 if needed is None else needed)}."
    )


def require_known(whose: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(map(repr, known)) or 'none'}."
            raise DataError(f"{whose}: the name {name!r} is not known. {hint}")
