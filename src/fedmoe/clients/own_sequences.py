"""Sequences of different lengths side by side: padded at the end, so that a model can tell padding from what is real.

Of ids (L,), whole numbers from 1, padding is 0, as in the texts that come with the package. Of numbers (L,) or (L, F) a
last channel is added that is 1 where a step is real. `fedmoe.models.split_mask` reads both.
Shape suffixes: N rows, L steps, F channels.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedmoe.clients.common_knowledge import OwnClient, beyond, shared_rows
from fedmoe.clients.own_records import as_tensor
from fedmoe.core_types import Examples
from fedmoe.errors import DataError

SequenceLength = int | Literal["longest"]
PARTS = ("train", "validation", "test")


def padded(rows: Iterable[Any], whose: str) -> Tensor:
    """(N, L) ids or (N, L, F + 1) numbers, L being the longest of these."""
    steps = [as_tensor(row, f"{whose}, row {at}") for at, row in enumerate(rows)]
    if not steps:
        return torch.zeros(0, 0, dtype=torch.int64)
    is_ids = not steps[0].is_floating_point()
    for at, row in enumerate(steps):
        if row.is_floating_point() == is_ids or row.dim() not in ((1,) if is_ids else (1, 2)):
            raise DataError(
                f"{whose}, row {at}: x is {row.dtype} of shape {tuple(row.shape)}. Give ids (L,), or numbers (L,) or "
                "(L, F), the same for all rows."
            )
        if is_ids and bool((row < 1).any()):
            raise DataError(f"{whose}, row {at}: an id is {int(row.min())}, but 0 is padding. Number ids from 1.")
    if is_ids:
        return torch.nn.utils.rnn.pad_sequence([row.long() for row in steps], batch_first=True)
    channels = {1 if row.dim() == 1 else row.shape[1] for row in steps}
    if len(channels) > 1:
        raise DataError(f"{whose}: steps have {sorted(channels)} channels in different rows. Give all the same.")
    marked = [torch.cat([row.reshape(len(row), -1).float(), torch.ones(len(row), 1)], 1) for row in steps]
    return torch.nn.utils.rnn.pad_sequence(marked, batch_first=True)


def lengths(x: Tensor) -> Tensor:
    """(N,): how many steps are real."""
    real_NL: Tensor = (x[..., -1] if x.is_floating_point() else x) != 0
    return real_NL.sum(1)


def with_one_length(
    everyone: Sequence[OwnClient], sharing: Sequence[OwnClient], given_test: Examples | None, wanted: SequenceLength
) -> tuple[list[OwnClient], Examples | None]:
    """All rows padded to `wanted` steps, or to as many as the longest row that may be shared has."""
    length = (
        max(int(lengths(rows.x).max()) for rows in shared_rows(sharing) if len(rows.y))
        if wanted == "longest"
        else wanted
    )

    def fit(rows: Examples, whose: str) -> Examples:
        most = int(lengths(rows.x).max()) if len(rows.y) else 0
        if most > length:
            if wanted == "longest":
                raise DataError(beyond(whose, "a sequence of length", most, length + 1, "sequence_length={}", most))
            raise DataError(
                f"{whose} has a sequence of {most} steps, beyond sequence_length={length}. Cut it or raise it."
            )
        return rows._replace(x=_resized(rows.x, length))

    fitted = []
    for one in everyone:
        train, validation, test = (fit(getattr(one.records, part), f"client {one.name!r}, {part}") for part in PARTS)
        fitted.append(one._replace(records=one.records._replace(train=train, validation=validation, test=test)))
    return fitted, None if given_test is None else fit(given_test, "global_test")


def _resized(x: Tensor, length: int) -> Tensor:
    made = x.new_zeros(len(x), length, *x.shape[2:])
    shared = min(length, x.shape[1])
    made[:, :shared] = x[:, :shared]
    return made


def count_ids(
    declared: int | None, sharing: Sequence[OwnClient], parts: Mapping[str, Examples], *, are_sequences: bool
) -> int | None:
    """The size of the vocabulary, padding included; None where x is no ids."""
    first = next(iter(parts.values())).x
    if first.is_floating_point() or (declared is None and not are_sequences):
        return None
    known = declared or 1 + max(int(rows.x.max()) for rows in shared_rows(sharing) if rows.x.numel())
    for whose, rows in parts.items():
        most = int(rows.x.max()) if rows.x.numel() else 0
        if most >= known:
            if declared:
                raise DataError(f"{whose} has the id {most}, beyond vocabulary_size={declared}. Declare more.")
            raise DataError(beyond(whose, "the id", most, known, "vocabulary_size={}", most + 1))
    return known
