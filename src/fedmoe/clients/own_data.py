"""The user's own data as a federation: one entry per client, held as given.

What every client must know (how many classes, how many values of side information) is taken from records that may be
shared, never from opted-out records or unseen clients: else a model's shape, which is sent, would depend on them.
"""

import difflib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.clients.federation import Federation, Records, examples, keep, take
from fedmoe.clients.own_records import ExampleSource, OptedOut, read_examples, read_mask
from fedmoe.core_types import Examples
from fedmoe.errors import DataError
from fedmoe.streams import torch_stream

# Everything, or by part: "train", and if given "validation" and "test".
ClientInput = ExampleSource | Mapping[str, ExampleSource]
PARTS = ("train", "validation", "test")
MANY_ROWS = 10  # of so many rows, one for training is no training data


class OwnClient(NamedTuple):
    name: str
    records: Records
    test_opted_in: Tensor  # (N,) bool: test rows that may go into a test set for everyone


def federation_from_clients(
    clients: Mapping[str, ClientInput],
    *,
    num_classes: int | None = None,
    side_values: Mapping[str, int] | None = None,
    unseen: Collection[str] = (),
    global_test: ExampleSource | None = None,
    opted_out: Mapping[str, OptedOut] | None = None,
    validation_share: float = 0.2,
    test_share: float = 0.2,
    seed: int = 0,
) -> Federation:
    """One client per name; parts that a client does not give are cut from its training rows by the shares.

    Rows are (x, y), or (x, y, side): what else is known of each row when training, as whole numbers from 0 by name,
    such as {"angle": ...}. A test part needs none.

    Args:
        num_classes: default: as many as opted-in training and validation rows of clients that take part show, and
            the global test if one is given. A row with a higher label is then refused: declare the number.
        side_values: how many values side information has, by name; the default is found likewise.
        unseen: clients that never train with the others; they are numbered last.
        global_test: what every model is scored on; default: the opted-in test rows of clients that take part,
            balanced over classes as far as they go. Rows of opted-out and unseen clients stay with their clients.
        opted_out: True for a whole client, or one bool per row that it gave for training, True where a row is out.

    >>> x, y = torch.randn(10, 4), torch.arange(10) % 2
    >>> federation = federation_from_clients({"ward": (x, y), "lab": (x, y)}, opted_out={"lab": True})
    >>> len(federation.load(0).train.y), [federation.names[client] for client in federation.participants]
    (6, ['ward'])
    """
    opted_out = opted_out or {}
    require_known("unseen", unseen, clients)
    require_known("opted_out", opted_out, clients)
    shares = {"validation": validation_share, "test": test_share}
    _require_shares(shares)
    names = sorted(clients, key=lambda name: name in unseen)  # stable: the given order, unseen clients last
    num_clients = sum(name not in unseen for name in names)
    everyone = [_client(n, clients[n], opted_out.get(n, False), shares, num_classes, seed) for n in names]
    participants = [c for c, one in enumerate(everyone[:num_clients]) if bool(one.records.train_opted_in.any())]
    if not participants:
        raise DataError(f"none of the {len(names)} clients has a training row to share. Opt in one that is not unseen.")
    sharing = [everyone[client] for client in participants]
    given_test = None if global_test is None else read_examples(global_test, "global_test", num_classes)
    parts = dict(_parts(everyone))
    _require_one_kind(parts if given_test is None else {**parts, "global_test": given_test})
    shared_test = _balanced(sharing, seed) if given_test is None else given_test
    return Federation(
        num_clients=num_clients,
        num_unseen=len(names) - num_clients,
        num_classes=_num_classes(num_classes, sharing, given_test, parts),
        input_shape=tuple(everyone[0].records.train.x.shape[1:]),
        participants=np.array(participants, dtype=np.int64),
        global_test=shared_test,
        load=[one.records for one in everyone].__getitem__,
        names=names,
        digest=_digest(num_clients, [one.records for one in everyone], shared_test),
        opted_in_digest=_digest(num_clients, [_opted_in(one.records) for one in everyone[:num_clients]], shared_test),
        side_values=_side_values(side_values or {}, sharing, parts),
    )


def _client(
    name: str, given: ClientInput, opted_out: OptedOut, shares: Mapping[str, float], num_classes: int | None, seed: int
) -> OwnClient:
    whose, sources = f"client {name!r}", given if isinstance(given, Mapping) else {"train": given}
    require_known(whose, sources, PARTS)
    if "train" not in sources:
        raise DataError(f"{whose} has no part 'train'. Give one, or a bare (x, y) that is cut for you.")
    read = {p: read_examples(sources[p], whose if p == "train" else f"{whose}, {p}", num_classes) for p in sources}
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


def _balanced(sharing: Sequence[OwnClient], seed: int) -> Examples:
    """Opted-in rows of the test parts; no class has more of them than its even share of all."""
    tests = [keep(one.records.test, one.test_opted_in) for one in sharing]
    x, y = (torch.cat([getattr(test, field) for test in tests]) for field in ("x", "y"))
    order = torch.randperm(len(y), generator=torch_stream(seed, "own data", "global test"))
    even = len(y) // max(1, len(y.unique()))
    chosen = torch.cat([order[:0], *(order[y[order] == label][:even] for label in y.unique())]).sort().values
    return examples(x[chosen], y[chosen])


def _parts(clients: Sequence[OwnClient]) -> Iterator[tuple[str, Examples]]:
    for one in clients:
        for part in PARTS:
            yield f"client {one.name!r}, {part}", getattr(one.records, part)


def _shared_rows(sharing: Sequence[OwnClient]) -> Iterator[Examples]:
    """What may shape a message: opted-in training and validation rows of clients that take part."""
    for one in sharing:
        yield keep(one.records.train, one.records.train_opted_in)
        yield keep(one.records.validation, one.records.validation_opted_in)


def _num_classes(
    declared: int | None, sharing: Sequence[OwnClient], given_test: Examples | None, parts: Mapping[str, Examples]
) -> int:
    if declared is not None:
        return declared  # every label was compared with it when it was read
    labels = torch.cat([rows.y for rows in _shared_rows(sharing)] + ([] if given_test is None else [given_test.y]))
    known = int(labels.max()) + 1
    for whose, part in parts.items():
        if len(part.y) and int(part.y.max()) >= known:
            raise DataError(_beyond(whose, "a label", int(part.y.max()), known, "num_classes={}"))
    return known


def _side_values(
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
    shared = list(_shared_rows(sharing))
    found = {kind: int(torch.cat([rows.extra[kind] for rows in shared]).max()) + 1 for kind in known}
    values = {**found, **declared}
    for whose, part in trained.items():
        for kind in known:
            if not len(part.y) or (most := int(part.extra[kind].max())) < values[kind]:
                continue
            if kind in declared:
                raise DataError(f"{whose} has {kind!r} {most}, beyond side_values={dict(declared)}. Declare more.")
            raise DataError(_beyond(whose, f"{kind!r}", most, values[kind], f"side_values={{{{{kind!r}: {{}}}}}}"))
    return values


def _beyond(whose: str, what: str, value: int, known: int, declare: str) -> str:
    return (
        f"{whose} has {what} {value}, but the rows that may be shared (opted in, for training or validation, of "
        f"clients that take part) go up to {known - 1}, and no other row may shape the model that is sent. "
        f"Declare {declare.format(value + 1)}."
    )


def _require_shares(shares: Mapping[str, float]) -> None:
    words = " and ".join(f"{part}_share={share}" for part, share in shares.items())
    if not all(0 <= share < 1 for share in shares.values()):
        raise DataError(f"{words}: one is no share of the rows. Set both from 0 to below 1.")
    if sum(shares.values()) >= 1:
        raise DataError(f"{words} leave nothing to train on. Set them to less than 1 together.")


def _require_one_kind(parts: Mapping[str, Examples]) -> None:
    """One shape and dtype of x: clients are put side by side, and one model reads them all."""
    kinds = {whose: f"{part.x.dtype} of shape {tuple(part.x.shape[1:])}" for whose, part in parts.items()}
    first = next(iter(kinds))
    for whose, kind in kinds.items():
        if kind != kinds[first]:
            raise DataError(f"{whose}: x is {kind}, but of {first} {kinds[first]}. Bring all to one shape and type.")


def require_known(whose: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(map(repr, known)) or 'none'}."
            raise DataError(f"{whose}: the name {name!r} is not known. {hint}")


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
