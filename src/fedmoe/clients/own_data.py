"""The user's own data as a federation: one entry per client, held as given.

What every client must know (how many classes, and so on) is taken from rows that may be shared: `common_knowledge`.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedmoe import trees
from fedmoe.clients.common_knowledge import OwnClient, count_classes, count_side_values, require_known
from fedmoe.clients.federation import Federation, Records, examples, keep, take
from fedmoe.clients.own_labels import Parts, number_labels, with_numbers
from fedmoe.clients.own_records import (
    WHOLE_TABLE,
    Collate,
    ExampleArrays,
    ExampleSource,
    OptedOut,
    TaskName,
    arrays_of,
    is_frame,
    read_examples,
    read_mask,
)
from fedmoe.clients.own_sequences import SequenceLength, count_ids, padded, with_one_length
from fedmoe.core_types import Examples
from fedmoe.errors import DataError
from fedmoe.streams import torch_stream

# Everything, or by part: "train", and if given "validation" and "test".
ClientInput = ExampleSource | Mapping[str, ExampleSource]
PARTS = ("train", "validation", "test")
MANY_ROWS = 10  # of so many rows, one for training is no training data


def federation_from_clients(
    clients: Mapping[str, ClientInput],
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    task: TaskName = "classification",
    side_values: Mapping[str, int] | None = None,
    collate: Collate | None = None,
    sequence_length: SequenceLength | None = None,
    vocabulary_size: int | None = None,
    unseen: Collection[str] = (),
    global_test: ExampleSource | None = None,
    opted_out: Mapping[str, OptedOut] | Collection[str] | None = None,
    validation_share: float = 0.2,
    test_share: float = 0.2,
    seed: int = 0,
) -> Federation:
    """One client per name; parts that a client does not give are cut from its training rows by the shares.

    Rows are (x, y), or (x, y, side): what else is known of each row when training, as whole numbers from 0 by name,
    such as {"angle": ...}. A test part needs none. Labels are whole numbers from 0, or words.

    Args:
        num_classes: default: as many as opted-in training and validation rows of clients that take part show, and
            the global test if one is given. A row with a higher label is then refused: declare the number.
        class_names: what the classes are called, in order; default: of labels that are words, those found likewise.
        task: "regression" where y are numbers, (N,) or several per row (N, T); then there are no classes.
        side_values: how many values side information has, by name; the default is found likewise.
        collate: of a torch Dataset whose rows are no pairs (x, y): a list of rows -> (x, y) of them all.
        sequence_length: x are rows of different lengths, ids from 1 or numbers; they are padded to so many steps, or to
            the "longest" that may be shared, and `fedmoe.models.split_mask` tells a module what is padding.
        vocabulary_size: of ids, padding (0) included; of such sequences the default is found likewise.
        unseen: clients that never train with the others; they are numbered last.
        global_test: what every model is scored on; default: the opted-in test rows of clients that take part,
            balanced over classes as far as they go. Rows of opted-out and unseen clients stay with their clients.
        opted_out: names of clients; or by name True, or one bool per row given for training, True where it is out.

    >>> x, y = torch.randn(10, 4), torch.arange(10) % 2
    >>> federation = federation_from_clients({"ward": (x, y), "lab": (x, y)}, opted_out=["lab"])
    >>> len(federation.load(0).train.y), [federation.names[client] for client in federation.participants]
    (6, ['ward'])
    """
    out = _require_names(clients, unseen, opted_out)
    is_regression = task == "regression"
    if is_regression and (num_classes is not None or class_names is not None):
        raise DataError("task='regression' has no classes, but num_classes or class_names is given. Leave it away.")
    shares = {"validation": validation_share, "test": test_share}
    _require_shares(shares)
    how = (collate, sequence_length is not None)
    given = {name: _parts_given(name, clients[name], *how) for name in clients}
    given, found_names = (given, ()) if is_regression else number_labels(given, class_names, unseen, out)
    declared = num_classes or len(found_names) or None
    if found_names and len(found_names) != declared:
        raise DataError(f"num_classes={num_classes}, but class_names has {len(found_names)}. Leave num_classes away.")
    names = sorted(clients, key=lambda name: name in unseen)  # stable: the given order, unseen clients last
    num_clients = sum(name not in unseen for name in names)
    everyone = [_client(n, given[n], out.get(n, False), shares, declared, task, seed) for n in names]
    participants = [c for c, one in enumerate(everyone[:num_clients]) if bool(one.records.train_opted_in.any())]
    if not participants:
        raise DataError(f"none of the {len(names)} clients has a training row to share. Opt in one that is not unseen.")
    given_test = None
    if global_test is not None:
        arrays = _given(global_test, "global_test", *how)
        arrays = arrays if is_regression else with_numbers(arrays, found_names, "global_test")
        given_test = read_examples(arrays, "global_test", declared, task)
    if sequence_length is not None:
        sharing = [everyone[client] for client in participants]
        everyone, given_test = with_one_length(everyone, sharing, given_test, sequence_length)
    sharing = [everyone[client] for client in participants]
    parts = dict(_parts(everyone))
    and_test = parts if given_test is None else {**parts, "global_test": given_test}
    _require_one_kind(and_test)
    shared_test = _balanced(sharing, task, seed) if given_test is None else given_test
    records = [one.records for one in everyone]
    return Federation(
        num_clients=num_clients,
        num_unseen=len(names) - num_clients,
        num_classes=0 if is_regression else count_classes(declared, sharing, given_test, parts),
        target_shape=tuple(records[0].train.y.shape[1:]) if is_regression else None,
        input_shape=tuple(records[0].train.x.shape[1:]),
        participants=np.array(participants, dtype=np.int64),
        global_test=shared_test,
        load=records.__getitem__,
        names=names,
        digest=_digest(num_clients, records, shared_test),
        opted_in_digest=_digest(num_clients, [_opted_in(one) for one in records[:num_clients]], shared_test),
        vocabulary_size=count_ids(vocabulary_size, sharing, and_test, are_sequences=sequence_length is not None),
        side_values=count_side_values(side_values or {}, sharing, parts),
        class_names=found_names,
    )


def _require_names(
    clients: Mapping[str, ClientInput],
    unseen: Collection[str],
    opted_out: Mapping[str, OptedOut] | Collection[str] | None,
) -> Mapping[str, OptedOut]:
    """Clients by name, and `opted_out` by the name of a client."""
    if is_frame(clients):
        raise DataError(f"clients= is a {type(clients).__name__}. Give a dict by name, {WHOLE_TABLE}.")
    if not isinstance(clients, Mapping):
        raise DataError(
            f"clients= is a {type(clients).__name__}. Give a dict by name, such as {{'north': (x, y)}}; of a list: "
            "{f'client {n}': rows for n, rows in enumerate(clients)}."
        )
    for name in clients:
        if not isinstance(name, str):
            raise DataError(f"the name of a client is {name!r}, a {type(name).__name__}. Name clients by text.")
    if isinstance(opted_out, str):
        raise DataError(f"opted_out={opted_out!r} is a text. Give a list of clients: opted_out=[{opted_out!r}].")
    out = opted_out if isinstance(opted_out, Mapping) else dict.fromkeys(opted_out or (), True)
    require_known("unseen", unseen, clients)
    require_known("opted_out", out, clients)
    return out


def _parts_given(name: str, given: ClientInput, collate: Collate | None, are_sequences: bool) -> Parts:
    whose, sources = f"client {name!r}", given if isinstance(given, Mapping) else {"train": given}
    require_known(whose, sources, PARTS)
    if "train" not in sources:
        raise DataError(f"{whose} has no part 'train'. Give one, or a bare (x, y) that is cut for you.")
    return {
        part: _given(sources[part], whose if part == "train" else f"{whose}, {part}", collate, are_sequences)
        for part in sources
    }


def _given(source: ExampleSource, whose: str, collate: Collate | None, are_sequences: bool) -> ExampleArrays:
    arrays = arrays_of(source, whose, collate, are_sequences)
    return (padded(arrays[0], whose), *arrays[1:]) if are_sequences else arrays


def _client(
    name: str,
    given: Parts,
    opted_out: OptedOut,
    shares: Mapping[str, float],
    num_classes: int | None,
    task: TaskName,
    seed: int,
) -> OwnClient:
    whose = f"client {name!r}"
    read = {p: read_examples(given[p], whose if p == "train" else f"{whose}, {p}", num_classes, task) for p in given}
    train = read.pop("train")
    if not len(train.y):
        raise DataError(f"{whose} is empty: it has no training row. Leave it out.")
    out_N = read_mask(whose, opted_out, len(train.y))
    rows = _cut(len(train.y), {part: 0.0 if part in read else share for part, share in shares.items()}, seed, name)
    parts = {part: take(train, at) for part, at in rows.items()}
    out = {part: out_N[at] for part, at in rows.items()}
    for part, one in read.items():
        if len(one.y):  # an empty part is a way to ask for no cut
            parts[part], out[part] = one, out_N.all().expand(len(one.y))  # the mask says nothing of these rows
    records = Records(**parts, train_opted_in=~out["train"], validation_opted_in=~out["validation"])
    return OwnClient(name, records, ~out["test"])


def _cut(size: int, shares: Mapping[str, float], seed: int, name: str) -> dict[str, Any]:
    """Rows of each part in the given order, drawn by a stream of this client's own; at least one row trains."""
    num_test = min(round(shares["test"] * size), size - 1)
    num_validation = min(round(shares["validation"] * size), size - 1 - num_test)
    if not num_test + num_validation:
        return {"train": slice(None), "validation": slice(0, 0), "test": slice(0, 0)}
    if size >= MANY_ROWS and size - num_test - num_validation == 1:
        raise DataError(
            f"client {name!r} has {size} rows, and validation_share={shares['validation']} with "
            f"test_share={shares['test']} leave one of them for training. Lower the shares."
        )
    order = torch.randperm(size, generator=torch_stream(seed, "own data", name))
    rows = order.split([size - num_test - num_validation, num_validation, num_test])
    return {part: at.sort().values for part, at in zip(PARTS, rows, strict=True)}


def _balanced(sharing: Sequence[OwnClient], task: TaskName, seed: int) -> Examples:
    """Opted-in rows of the test parts; no class has more of them than its even share of all."""
    tests = [keep(one.records.test, one.test_opted_in) for one in sharing]
    x, y = (torch.cat([getattr(test, field) for test in tests]) for field in ("x", "y"))
    if task == "regression":
        return examples(x, y)
    order = torch.randperm(len(y), generator=torch_stream(seed, "own data", "global test"))
    even = len(y) // max(1, len(y.unique()))
    chosen = torch.cat([order[:0], *(order[y[order] == label][:even] for label in y.unique())]).sort().values
    return examples(x[chosen], y[chosen])


def _parts(clients: Sequence[OwnClient]) -> Iterator[tuple[str, Examples]]:
    for one in clients:
        for part in PARTS:
            yield f"client {one.name!r}, {part}", getattr(one.records, part)


def _require_shares(shares: Mapping[str, float]) -> None:
    words = " and ".join(f"{part}_share={share}" for part, share in shares.items())
    if not all(0 <= share < 1 for share in shares.values()):
        raise DataError(f"{words}: one is no share of the rows. Set both from 0 to below 1.")
    if sum(shares.values()) >= 1:
        raise DataError(f"{words} leave nothing to train on. Set them to less than 1 together.")


def _require_one_kind(parts: Mapping[str, Examples]) -> None:
    """One shape and dtype of x, one shape of y: clients are put side by side, and one model reads them all."""
    for what in ("x", "y"):
        tensors = {whose: getattr(part, what) for whose, part in parts.items()}
        kinds = {whose: f"{one.dtype} of shape {tuple(one.shape[1:])}" for whose, one in tensors.items()}
        first = next(iter(kinds))
        for whose, kind in kinds.items():
            if kind != kinds[first]:
                raise DataError(
                    f"{whose}: {what} is {kind}, but of {first} {kinds[first]}. Bring all to one shape and type."
                )


def _opted_in(one: Records) -> Records:
    """Without any record that its owner opted out, and without test records, which say nothing of that."""
    train, validation = take(one.train, one.train_opted_in), take(one.validation, one.validation_opted_in)
    nobody = one.test._replace(x=one.test.x[:0], y=one.test.y[:0], counts=torch.tensor(0), extra={})
    masks = one.train_opted_in[one.train_opted_in], one.validation_opted_in[one.validation_opted_in]
    return Records(train, validation, nobody, *masks)


def _digest(num_clients: int, records: Sequence[Records], shared: Examples) -> str:
    """Sizes, labels, data and masks: two runs with the same hash saw the same."""
    state = hashlib.blake2b(f"{num_clients},{len(records)}".encode(), digest_size=16)
    for tensor in (t for one in [*records, shared] for t in trees.leaves(one)):
        state.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
