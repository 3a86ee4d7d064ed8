"""The user's own data as a federation: one entry per client, held as given and checked row by row."""

import difflib
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedmoe import trees
from fedmoe.clients.federation import Federation, Records, examples, take
from fedmoe.core_types import Examples, Tensors
from fedmoe.errors import DataError
from fedmoe.streams import torch_stream

Array = Tensor | NDArray[Any]
Rows = tuple[Array, Array] | tuple[Array, Array, Mapping[str, Array]]  # x (N, ...), y (N,), side information (N,)
Source = Rows | Dataset[Any]
ClientInput = Source | Mapping[str, Source]  # everything, or by part: "train", and if given "validation" and "test"
OptedOut = bool | Sequence[bool] | Tensor
PARTS = ("train", "validation", "test")


def federation_from_clients(
    clients: Mapping[str, ClientInput],
    *,
    num_classes: int | None = None,
    unseen: Collection[str] = (),
    global_test: Source | None = None,
    opted_out: Mapping[str, OptedOut] | None = None,
    validation_share: float = 0.2,
    test_share: float = 0.2,
    seed: int = 0,
) -> Federation:
    """One client per name; parts that a client does not give are cut from its training rows by the shares.

    Rows are (x, y), or (x, y, side): what else is known of each row when training, as whole numbers from 0 by name,
    such as {"angle": ...}. A test part needs none.

    Args:
        unseen: clients that never train with the others; they are numbered last.
        global_test: what every model is scored on; default: all test parts, balanced over classes as far as they go.
        opted_out: True for a whole client, or one bool per row that it gave for training, True where a row is out.

    >>> x, y = torch.randn(10, 4), torch.arange(10) % 2
    >>> federation = federation_from_clients({"ward": (x, y), "lab": (x, y)}, opted_out={"lab": True})
    >>> len(federation.load(0).train.y), [federation.name_of(client) for client in federation.participants]
    (6, ['ward'])
    """
    opted_out = opted_out or {}
    _require_known("unseen", unseen, clients)
    _require_known("opted_out", opted_out, clients)
    shares = {"validation": validation_share, "test": test_share}
    if not all(0 <= share < 1 for share in shares.values()):
        raise DataError(f"{validation_share=} or {test_share=} is no share of the rows. Set both from 0 to below 1.")
    names = sorted(clients, key=lambda name: name in unseen)  # stable: the given order, unseen clients last
    num_clients = sum(name not in unseen for name in names)
    records = [_records(n, clients[n], opted_out.get(n, False), shares, num_classes, seed) for n in names]
    participants = [c for c, one in enumerate(records[:num_clients]) if bool(one.train_opted_in.any())]
    if not participants:
        raise DataError(f"none of the {len(names)} clients has a training row to share. Opt in one that is not unseen.")
    parts = {f"client {n!r}, {p}": getattr(r, p) for n, r in zip(names, records, strict=True) for p in PARTS}
    _require_one_kind(parts)
    side_values = _side_values(names, records)
    shared = _balanced(records, seed) if global_test is None else _read(global_test, "global_test", num_classes)
    _require_one_kind(parts := {**parts, "global_test": shared})
    return Federation(
        num_clients=num_clients,
        num_unseen=len(names) - num_clients,
        num_classes=num_classes or int(torch.cat([part.y for part in parts.values()]).max()) + 1,
        input_shape=tuple(records[0].train.x.shape[1:]),
        participants=np.array(participants, dtype=np.int64),
        global_test=shared,
        load=records.__getitem__,
        names=names,
        digest=_digest(num_clients, records, shared),
        side_values=side_values,
    )


def _records(
    name: str, given: ClientInput, opted_out: OptedOut, shares: Mapping[str, float], num_classes: int | None, seed: int
) -> Records:
    whose, sources = f"client {name!r}", given if isinstance(given, Mapping) else {"train": given}
    _require_known(whose, sources, PARTS)
    if "train" not in sources:
        raise DataError(f"{whose} has no part 'train'. Give one, or a bare (x, y) that is cut for you.")
    read = {p: _read(sources[p], whose if p == "train" else f"{whose}, {p}", num_classes) for p in sources}
    train = read.pop("train")
    if not len(train.y):
        raise DataError(f"{whose} is empty: it has no training row. Leave it out.")
    out_N = _mask(whose, opted_out, len(train.y))
    rows = _cut(len(train.y), {part: 0.0 if part in read else share for part, share in shares.items()}, seed, name)
    parts = {part: take(train, at) for part, at in rows.items()}
    out = {part: out_N[at] for part, at in rows.items()}
    for part, one in read.items():
        if len(one.y):  # an empty part is a way to ask for no cut
            parts[part], out[part] = one, out_N.all().expand(len(one.y))  # the mask says nothing of these rows
    return Records(**parts, train_opted_in=~out["train"], validation_opted_in=~out["validation"])


def _cut(size: int, shares: Mapping[str, float], seed: int, name: str) -> dict[str, Any]:
    """Rows of each part in the given order, drawn by a stream of this client's own; at least one row trains."""
    num_test = min(round(shares["test"] * size), size - 1)
    num_validation = min(round(shares["validation"] * size), size - 1 - num_test)
    if not num_test + num_validation:
        return {"train": slice(None), "validation": slice(0, 0), "test": slice(0, 0)}
    order = torch.randperm(size, generator=torch_stream(seed, "own data", name))
    rows = order.split([size - num_test - num_validation, num_validation, num_test])
    return {part: at.sort().values for part, at in zip(PARTS, rows, strict=True)}


def _read(source: Source, whose: str, num_classes: int | None) -> Examples:
    if isinstance(source, Dataset) and hasattr(source, "__len__"):
        source = _stacked([source[row] for row in range(len(source))], whose)
    if not (isinstance(source, tuple | list) and len(source) in (2, 3)):
        raise DataError(f"{whose} is a {type(source).__name__}. Give (x, y) arrays, or a torch Dataset with a length.")
    x, y = (_tensor(array, whose) for array in source[:2])
    if y.dim() != 1 or x.dim() < 1 or len(x) != len(y):
        raise DataError(f"{whose}: x has shape {tuple(x.shape)} and y {tuple(y.shape)}. Give one label number per row.")
    x = x.to(torch.float32) if x.is_floating_point() else x
    if not bool(x.isfinite().all()):
        row = int((~x.isfinite()).reshape(len(x), -1).any(1).nonzero()[0])
        raise DataError(f"{whose}, row {row}: x holds NaN or infinity (as float32). Mend or drop the row.")
    return examples(x, _whole_numbers(y, whose, "label", num_classes), _side(source[2:], whose, len(y)))


def _side(given: Sequence[Any], whose: str, size: int) -> Tensors:
    if not all(isinstance(one, Mapping) for one in given):
        raise DataError(f"{whose}: side information is a {type(given[0]).__name__}. Give a dict of arrays by name.")
    arrays = {name: _tensor(array, f"{whose}, {name!r}") for one in given for name, array in one.items()}
    for name, array in arrays.items():
        if array.shape != (size,):
            raise DataError(
                f"{whose}: {name!r} has shape {tuple(array.shape)}, for {size} rows. Give a number per row."
            )
    return {name: _whole_numbers(array, whose, repr(name), None) for name, array in arrays.items()}


def _stacked(items: Sequence[Any], whose: str) -> Rows:
    xs, ys, sides = list[Tensor](), list[Tensor](), list[Mapping[str, Any]]()
    for row, item in enumerate(items):
        if not (isinstance(item, tuple | list) and len(item) in (2, 3)):
            raise DataError(f"{whose}, row {row}: the Dataset gives a {type(item).__name__}, not a pair (x, y).")
        for tensors, array in zip((xs, ys), item, strict=False):
            tensors.append(_tensor(array, f"{whose}, row {row}"))
        if not isinstance(side := item[2] if len(item) == 3 else {}, Mapping):
            raise DataError(f"{whose}, row {row}: side information is a {type(side).__name__}, not a dict by name.")
        sides.append(side)
        if ys[row].dim() or xs[row].shape != xs[0].shape:
            raise DataError(f"{whose}, row {row}: x has another shape than the first, or y is not one number.")
        if set(sides[row]) != set(sides[0]):
            raise DataError(
                f"{whose}, row {row}: side information is {sorted(sides[row])}, of row 0 {sorted(sides[0])}."
            )
    if not xs:
        return torch.zeros(0), torch.zeros(0)
    side = {name: torch.stack([_tensor(one[name], whose) for one in sides]) for name in sides[0]}
    return torch.stack(xs), torch.stack(ys), side


def _tensor(array: Any, whose: str) -> Tensor:
    """Shares the memory of what was given; only an array that may not be written to is copied."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    try:
        return torch.as_tensor(array).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{whose}: a {type(array).__name__} is no array of numbers ({error}). Convert it.") from error


def _whole_numbers(values: Tensor, whose: str, what: str, num_classes: int | None) -> Tensor:
    number = values if values.is_floating_point() else values.to(torch.int64)
    highest = torch.iinfo(torch.int64).max - 1 if num_classes is None else num_classes - 1
    wrong = ((number < 0) | (number > highest) | (number != number.to(torch.int64))).nonzero()
    if len(wrong):
        row, upper = int(wrong[0]), "" if num_classes is None else f" to num_classes - 1 = {highest}"
        raise DataError(f"{whose}, row {row}: the {what} is {number[row].item()}. Give integers from 0{upper}.")
    return number.to(torch.int64)


def _mask(whose: str, opted_out: OptedOut, size: int) -> Tensor:
    if isinstance(opted_out, bool | np.bool_):
        return torch.full((size,), bool(opted_out))
    mask = _tensor(opted_out, f"opted_out of {whose}")
    if mask.dtype != torch.bool or mask.shape != (size,):
        kind = f"{mask.dtype} of shape {tuple(mask.shape)}, for {size} training rows"
        raise DataError(f"opted_out of {whose} is {kind}. Give one bool per row, or True for the whole client.")
    return mask


def _balanced(records: Sequence[Records], seed: int) -> Examples:
    """Rows of all test parts; no class has more of them than its even share of all."""
    x, y = (torch.cat([getattr(one.test, field) for one in records]) for field in ("x", "y"))
    order = torch.randperm(len(y), generator=torch_stream(seed, "own data", "global test"))
    even = len(y) // max(1, len(y.unique()))
    chosen = torch.cat([order[:0], *(order[y[order] == label][:even] for label in y.unique())]).sort().values
    return examples(x[chosen], y[chosen])


def _require_one_kind(parts: Mapping[str, Examples]) -> None:
    """One shape and dtype of x: clients are put side by side, and one model reads them all."""
    kinds = {whose: f"{part.x.dtype} of shape {tuple(part.x.shape[1:])}" for whose, part in parts.items()}
    first = next(iter(kinds))
    for whose, kind in kinds.items():
        if kind != kinds[first]:
            raise DataError(f"{whose}: x is {kind}, but of {first} {kinds[first]}. Bring all to one shape and type.")


def _side_values(names: Sequence[str], records: Sequence[Records]) -> dict[str, int]:
    """How many values each piece of side information has; whatever is trained on must have all of them."""
    known = sorted(records[0].train.extra)
    for name, one in zip(names, records, strict=True):
        for part, rows in (("train", one.train), ("validation", one.validation)):
            if sorted(rows.extra) != known:
                raise DataError(
                    f"client {name!r}, {part} has side information {sorted(rows.extra)}, but client {names[0]!r} has "
                    f"{known}. Give all training and validation rows the same."
                )
    values = {kind: [rows.extra[kind] for one in records for rows in (one.train, one.validation)] for kind in known}
    return {kind: int(torch.cat(tensors).max()) + 1 for kind, tensors in values.items()}


def _require_known(whose: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(map(repr, known))}."
            raise DataError(f"{whose}: the name {name!r} is not known. {hint}")


def _digest(num_clients: int, records: Sequence[Records], shared: Examples) -> str:
    """Sizes, labels, data and masks: two runs with the same hash saw the same."""
    state = hashlib.blake2b(f"{num_clients},{len(records)}".encode(), digest_size=16)
    for tensor in (t for one in [*records, shared] for t in trees.leaves(one)):
        state.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
