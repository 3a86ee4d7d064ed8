"""Opt-out is non-interference: whatever opted-out records are, clients send the same bytes."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.core_types import ClientId, Examples
from fedmoe.testing.federation import (
    FEATURES,
    NO_VALIDATION_IN,
    OPTED_OUT,
    SOME_OPTED_OUT,
    tiny_federation,
    tiny_records,
    with_records,
)
from fedmoe.testing.outcome import run_spied
from fedmoe.testing.subject import Subject, require

OptedOut = list[tuple[int, tuple[float, ...], int]]  # where among the records, values, label
TOUCHED = (SOME_OPTED_OUT, OPTED_OUT, NO_VALIDATION_IN)  # clients with opted-out records

# No opted-out record at all; and some between the others, ordinary, huge and not even numbers.
HUGE = (0, (1e30,) * FEATURES, 0)
NO_NUMBERS = (2, (float("nan"), float("inf"), -float("inf"), 0.0), 2)
ORDINARY = (9, (0.5, -1.0, 2.0, 0.0), 1)
EXAMPLES: tuple[OptedOut, ...] = ([], [HUGE], [ORDINARY, NO_NUMBERS, HUGE, ORDINARY])


def rewritten(plain: Records, train: OptedOut, validation: OptedOut) -> Records:
    """The same opted-in records; other opted-out ones, any number of them, anywhere between."""
    new_train, train_in = _with_opted_out(plain.train, plain.train_opted_in, train)
    new_validation, validation_in = _with_opted_out(plain.validation, plain.validation_opted_in, validation)
    return Records(new_train, new_validation, plain.test, train_in, validation_in)


def _with_opted_out(rows: Examples, opted_in: Tensor, others: OptedOut) -> tuple[Examples, Tensor]:
    together = [(x, y, True) for x, y in zip(rows.x[opted_in], rows.y[opted_in], strict=True)]
    for place, values, label in others:
        together.insert(place, (torch.tensor(values, dtype=torch.float32), torch.tensor(label), False))
    x = torch.stack([x for x, _, _ in together]) if together else rows.x[:0]
    y = torch.tensor([int(y) for _, y, _ in together], dtype=torch.int64)
    return examples(x, y), torch.tensor([flag for _, _, flag in together], dtype=torch.bool)


def bytes_sent(algorithm: Algorithm, federation: Federation, folder: Path) -> list[bytes]:
    """Every reply to an exchange of rounds, validation, release and delivery."""
    unpersonalised = algorithm._replace(personalize=None)
    _, spy = run_spied(unpersonalised, federation, folder / "store", release=algorithm.release is not None)
    return [sent.frame for sent in spy.exchanged]


def bytes_sent_with(
    algorithm: Algorithm, others: Mapping[ClientId, tuple[OptedOut, OptedOut]], folder: Path
) -> list[bytes]:
    """The same where some clients have these opted-out records, for training and for validation."""
    plain = tiny_records()
    changed = {client: rewritten(plain[client], *records) for client, records in others.items()}
    return bytes_sent(algorithm, with_records(tiny_federation(), changed), folder)


def opted_out_records_change_no_byte_sent(subject: Subject, folder: Path) -> None:
    algorithm = subject.make()
    before = bytes_sent(algorithm, tiny_federation(), folder / "plain")
    for number, records in enumerate(EXAMPLES):
        others = dict.fromkeys(TOUCHED, (records, records))
        sent = bytes_sent_with(algorithm, others, folder / str(number))
        require(sent == before, f"what clients send depends on opted-out records: with {records} it is different.")


def opted_in_records_change_bytes_sent(subject: Subject, folder: Path) -> None:
    """So the property above is not true of everything."""
    plain = tiny_records()[SOME_OPTED_OUT]
    x = plain.train.x.clone()
    x[plain.train_opted_in] += 0.5
    changed = {SOME_OPTED_OUT: plain._replace(train=plain.train._replace(x=x))}
    before = bytes_sent(subject.make(), tiny_federation(), folder / "before")
    after = bytes_sent(subject.make(), with_records(tiny_federation(), changed), folder / "after")
    require(before != after, "clients send the same whatever their opted-in records are: nothing is learnt from them.")
