"""Who and what is opted out: records that never influence what leaves a client, and clients that send nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmoe.data.dataset import Table
from fedmoe.errors import ConfigError
from fedmoe.partition.split import Indices, Shards, Split
from fedmoe.streams import numpy_stream

Flags = NDArray[np.bool_]
Rule = tuple[str, Sequence[int]]  # a column of the table, and the values that opt a record out


@dataclass(frozen=True)
class OptOut:
    """One flag per client, and per row of `split.train.rows` and `split.validation.rows`, in their order."""

    client_opted_in: Flags
    train_opted_in: Flags
    validation_opted_in: Flags

    def participants(self, split: Split) -> Indices:
        """Clients that may be sampled: they train, opted in, and have an opted-in training record."""
        records_C = np.bincount(_owners(split.train), self.train_opted_in, minlength=len(self.client_opted_in))
        able_C = self.client_opted_in & (records_C > 0)
        return np.flatnonzero(able_C[: split.num_clients]).astype(np.int64)


def opt_out(
    split: Split,
    table: Table,
    *,
    client_fraction: float = 0.0,
    clients: Sequence[int] = (),
    record_fraction: float = 0.0,
    rules: Sequence[Rule] = (),
    masks: Mapping[int, Flags] | None = None,
    seed: int,
) -> OptOut:
    """A record is out if anything says so: its client, a rule, the draw, or its client's mask (True: opted in).

    `client_fraction` q leaves max(1, ceil((1 - q) n)) of the n clients that train; `record_fraction` is taken from
    every client's training and validation records. `table` holds the rows that the split points to; masks are over
    a client's training rows.
    """
    _require_fraction("client_fraction", client_fraction)
    _require_fraction("record_fraction", record_fraction)
    client_opted_in = _draw_clients(split, client_fraction, seed)
    client_opted_in[_known_clients("clients", clients, split)] = False
    flags = {}
    for part, shards in (("train", split.train), ("validation", split.validation)):
        kept = client_opted_in[_owners(shards)]
        kept &= _draw_records(shards, record_fraction, part, seed)
        for field, values in rules:
            kept &= ~np.isin(_column(table, field)[shards.rows], list(values))
        flags[part] = kept
    flags["train"] &= _records_by_mask(split, masks or {})
    result = OptOut(client_opted_in, flags["train"], flags["validation"])
    _require_somebody(result, split, client_fraction, clients)
    return result


def _owners(shards: Shards) -> Indices:
    return np.repeat(np.arange(len(shards.sizes)), shards.sizes)


def _draw_clients(split: Split, fraction: float, seed: int) -> Flags:
    """Unseen clients never train, so they are not drawn."""
    staying = max(1, math.ceil(round((1 - fraction) * split.num_clients, 9)))  # rounded: (1 - 0.95) * 100 is above 5
    order = numpy_stream(seed, "opt out", "clients").permutation(split.num_clients)
    opted_in = np.ones(split.num_clients + split.num_unseen, dtype=np.bool_)
    opted_in[order[staying:]] = False
    return opted_in


def _draw_records(shards: Shards, fraction: float, part: str, seed: int) -> Flags:
    opted_in = np.ones(len(shards.rows), dtype=np.bool_)
    leaving_C = np.floor(fraction * shards.sizes + 0.5).astype(np.int64)
    for client in np.flatnonzero(leaving_C):
        order = numpy_stream(seed, "opt out", part, int(client)).permutation(shards.sizes[client])
        opted_in[shards.offsets[client] + order[: leaving_C[client]]] = False
    return opted_in


def _records_by_mask(split: Split, masks: Mapping[int, Flags]) -> Flags:
    opted_in = np.ones(len(split.train.rows), dtype=np.bool_)
    for client in _known_clients("masks", list(masks), split):
        mask, size = np.asarray(masks[int(client)]), split.train.sizes[client]
        if mask.dtype != np.bool_ or mask.shape != (size,):
            raise ConfigError(
                f"opt_out.masks: the mask of client {client} is {mask.dtype} of shape {mask.shape}, but the client "
                f"has {size} training records. Give one bool per record, True if it is opted in."
            )
        opted_in[split.train.offsets[client] : split.train.offsets[client + 1]] = mask
    return opted_in


def _known_clients(key: str, clients: Sequence[int], split: Split) -> Indices:
    ids = np.array(list(clients), dtype=np.int64)
    known = split.num_clients + split.num_unseen
    unknown = ids[(ids < 0) | (ids >= known)]
    if unknown.size:
        raise ConfigError(
            f"opt_out.{key} names client {unknown[0]}, but clients go from 0 to {known - 1}. Remove it from the list."
        )
    return ids


def _column(table: Table, field: str) -> NDArray[np.generic]:
    if field not in table.columns:
        raise ConfigError(
            f"opt_out.rules: the data set has no field {field!r}. Use one of: {', '.join(table.columns)}."
        )
    column: NDArray[np.generic] = table.column(field).numpy()
    return column


def _require_fraction(key: str, fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise ConfigError(f"opt_out.{key}={fraction} is not a share of a whole. Set it between 0 and 1.")


def _require_somebody(result: OptOut, split: Split, client_fraction: float, clients: Sequence[int]) -> None:
    if not result.client_opted_in[: split.num_clients].any():
        raise ConfigError(
            f"opt_out.clients (with {len(clients)} ids) and opt_out.client_fraction={client_fraction} leave none of "
            f"the {split.num_clients} clients opted in, so nothing could be trained. Leave at least one in."
        )
    if not result.participants(split).size:
        raise ConfigError(
            "opt_out: no client that opted in has a training record left that is opted in, so nothing could be "
            "trained. Lower opt_out.record_fraction, or loosen opt_out.rules or opt_out.masks."
        )
