"""A federation: who holds what, read by client id, so that cost follows the clients in use and not the population."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe import trees
from fedmoe.clients.opt_out import OptOut
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors, without_labels
from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.tables import TableSchema
from fedmoe.errors import DataError
from fedmoe.partition.draw import Transform
from fedmoe.partition.split import Indices, Split

SHOWN_NAMES = 20  # in a message
MOST_KEPT = 32 * 2**20  # bytes of prepared records in each process
SHOWN_CLASSES = 10


class ClientDataset(Protocol):
    """Everything that one client holds. Test examples are only ever scored. Parts may be made when first asked for."""

    @property
    def train(self) -> Examples: ...
    @property
    def validation(self) -> Examples: ...
    @property
    def test(self) -> Examples: ...
    @property
    def train_opted_in(self) -> Tensor: ...
    @property
    def validation_opted_in(self) -> Tensor: ...
    @property
    def unlabelled(self) -> Examples | None:
        """Inputs (`without_labels`) of a new client that has no labels; None: its training inputs serve for them."""


class Records(NamedTuple):
    """A client whose parts are all there already."""

    train: Examples
    validation: Examples
    test: Examples
    train_opted_in: Tensor  # (N,) bool
    validation_opted_in: Tensor

    @property
    def unlabelled(self) -> Examples | None:
        return None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{part} {len(getattr(self, part).y)}" for part in ("train", "validation", "test"))
        return f"<Records: rows {sizes}; opted in {int(self.train_opted_in.sum() + self.validation_opted_in.sum())}>"


class PublicData(NamedTuple):
    """Examples that no client holds. A model trained on them may be given to everybody."""

    train: Examples
    validation: Examples  # decide when to stop, and calibrate


@dataclass(frozen=True)
class Federation:
    """Clients 0 … num_clients - 1 may train together; the num_unseen after them never do."""

    num_clients: int
    num_unseen: int
    num_classes: int  # 0 in a regression
    input_shape: tuple[int, ...]
    participants: Indices  # training clients that opted in and have an opted-in training record
    global_test: Examples
    load: Callable[[ClientId], ClientDataset]
    names: Sequence[str] | None = None
    digest: str = ""  # of the split: two runs with the same one saw the same data
    opted_in_digest: str = ""  # the same over opted-in records alone, where `digest` is over the records themselves
    vocabulary_size: int | None = None  # of texts: how many ids there are, padding (0) included
    # What else is known of every training and validation example, in `Examples.extra`: names, and how many values.
    side_values: Mapping[str, int] = field(default_factory=dict)
    # The unseen client that is scored on a sample of everyone's validation examples, if there is one.
    pooled: ClientId | None = None
    # The first so many of the unseen clients are for choosing settings and thresholds; the others test.
    num_validation: int = 0
    public: Callable[[], PublicData] | None = None
    global_validation: Examples | None = None  # balanced rows that nobody holds: to choose settings by
    is_elsewhere: bool = False  # the records are on the clients' own machines: `load` shows their form alone
    class_names: tuple[str, ...] = ()  # where classes have names
    table: TableSchema | None = None  # of rows of a table: what turned them into x, and reads new ones
    # Of one example's numbers in a regression, () for a single one; None for classes.
    target_shape: tuple[int, ...] | None = None

    @property
    def task(self) -> Literal["classification", "regression"]:
        return "classification" if self.target_shape is None else "regression"

    @property
    def num_outputs(self) -> int:
        """Of an expert: a score per class, or a number per target."""
        return self.num_classes if self.target_shape is None else math.prod(self.target_shape)

    def __repr__(self) -> str:
        shown = ", ".join(self.class_names[:SHOWN_CLASSES]) + (", …" if len(self.class_names) > SHOWN_CLASSES else "")
        facts = [
            f"{self.num_clients} clients, {len(self.participants)} of them opted in",
            *([f"{self.num_unseen} unseen"] if self.num_unseen else []),
            f"x {self.input_shape}",
            f"{self.num_classes} classes" + (f" ({shown})" if shown else ""),
            f"global test of {len(self.global_test.y)} rows",
        ]
        return f"<Federation: {'; '.join(facts)}>"

    def participates(self, client: ClientId) -> bool:
        """Whether this client trains with the others."""
        at = int(np.searchsorted(self.participants, client))
        return bool(at < len(self.participants) and self.participants[at] == client)

    def may_send(self, client: ClientId) -> bool:
        """Whether anything may leave this client: it takes part, or it is a new client that is asked what it needs."""
        return client >= self.num_clients or self.participates(client)

    def validates(self, client: ClientId) -> bool:
        """Whether settings and thresholds may be chosen by this client's scores."""
        return self.num_clients <= client < self.num_clients + self.num_validation

    def number_of(self, client: ClientId | str) -> ClientId:
        """By its name, or where clients have none by its number, also as text."""
        total = self.num_clients + self.num_unseen
        if isinstance(client, str) and self.names is None and client.isdecimal():
            client = int(client)
        if isinstance(client, str):
            if self.names is None or client not in self.names:
                known = ", ".join(self.names[:SHOWN_NAMES]) if self.names else f"0 to {total - 1}"
                more = f" and {total - SHOWN_NAMES} more" if self.names and total > SHOWN_NAMES else ""
                raise DataError(f"there is no client named {client!r}. Known: {known}{more}.")
            return list(self.names).index(client)
        if not 0 <= client < total:
            raise DataError(f"there is no client {client}: they are numbered 0 to {total - 1}.")
        return client

    def class_counts(self, client: ClientId) -> Tensor:
        """(C,): of opted-in training records; what the others are private about stays with their client."""
        records = self.load(client)
        return torch.bincount(records.train.y[records.train_opted_in], minlength=self.num_classes)

    def name_of(self, client: ClientId) -> str:
        return str(client) if self.names is None else self.names[client]

    @property
    def input_dtype(self) -> torch.dtype:
        return self.global_test.x.dtype

    def data(self, clients: Sequence[ClientId], *, opted_in_only: bool) -> ClientData:
        """The cohort's examples side by side. What leaves a client is computed from its opted-in records alone."""
        records = [self.load(client) for client in clients]
        inputs = [partial(_inputs, r, opted_in_only) for r in records]
        if not opted_in_only:
            return ClientData(
                lambda: side_by_side([r.train for r in records]),
                lambda: side_by_side([r.validation for r in records]),
                lambda: side_by_side([of_client() for of_client in inputs]),
            )
        return ClientData(
            lambda: side_by_side([keep(r.train, r.train_opted_in) for r in records]),
            lambda: side_by_side([keep(r.validation, r.validation_opted_in) for r in records]),
            lambda: side_by_side([of_client() for of_client in inputs]),
        )


def _inputs(records: ClientDataset, opted_in_only: bool) -> Examples:
    """No label is looked at on the way."""
    if records.unlabelled is not None:
        return records.unlabelled
    rows = without_labels(records.train)
    return keep(rows, records.train_opted_in) if opted_in_only else rows


def examples(x: Tensor, y: Tensor, extra: Tensors | None = None) -> Examples:
    return Examples(x, y, torch.tensor(len(y)), extra or {})


def keep(rows: Examples, mask: Tensor) -> Examples:
    return rows if bool(mask.all()) else take(rows, mask)


def take(rows: Examples, at: Tensor | slice) -> Examples:
    return examples(rows.x[at], rows.y[at], {name: tensor[at] for name, tensor in rows.extra.items()})


def side_by_side(clients: Sequence[Examples]) -> Examples:
    """Stack ragged clients, padded at the end with zeros."""
    if len(clients) == 1:
        return trees.tree_map(lambda leaf: leaf[None], clients[0])
    longest = max(one.y.shape[0] for one in clients)
    return trees.stack([one if one.y.shape[0] == longest else _padded(one, longest) for one in clients])


def _padded(one: Examples, length: int) -> Examples:
    x, y = one.x.new_zeros(length, *one.x.shape[1:]), one.y.new_zeros(length, *one.y.shape[1:])
    x[: len(one.y)], y[: len(one.y)] = one.x, one.y
    extra = {name: torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])]) for name, t in one.extra.items()}
    return one._replace(x=x, y=y, extra=extra)


def _is_small(dataset: Dataset, split: Split) -> bool:
    """Whether all that clients hold may stay in memory as models read it: then nothing is prepared twice."""
    rows = sum(len(shards.rows) for shards in (split.train, split.validation, split.test))
    one = dataset.prepare(dataset.train.x[:1])
    return rows * one.numel() * one.element_size() <= MOST_KEPT


def federation_from_split(
    dataset: Dataset, split: Split, opted: OptOut, transform: Transform | None = None
) -> Federation:
    """Clients as rows of one data set, prepared for the model when they are asked for.

    `transform` makes a client's domain: it is applied to all that the client holds, and not to the global test.
    """

    def rows(table: Table, index: Indices) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(index)
        return dataset.prepare(table.x[at]), table.y[at]

    def held(client: ClientId, part: str, table: Table, index: Indices) -> Examples:
        x, y = rows(table, index)
        return examples(*transform.apply(client, part, x, y)) if transform else examples(x, y)

    def mask(flags: NDArray[np.bool_], offsets: Indices, client: ClientId) -> Tensor:
        return torch.from_numpy(flags[offsets[client] : offsets[client + 1]])

    own_test = dataset.train if split.own_test == "train" else dataset.test

    class SplitClient:
        """A round needs a client's training rows, and preparing images takes time: nothing is made before its use."""

        def __init__(self, client: ClientId) -> None:
            self.client = client
            self.train_opted_in = mask(opted.train_opted_in, split.train.offsets, client)
            self.validation_opted_in = mask(opted.validation_opted_in, split.validation.offsets, client)

        @cached_property
        def train(self) -> Examples:
            return held(self.client, "train", dataset.train, split.train.of(self.client))

        @cached_property
        def validation(self) -> Examples:
            return held(self.client, "validation", dataset.train, split.validation.of(self.client))

        @cached_property
        def test(self) -> Examples:
            return held(self.client, "test", own_test, split.test.of(self.client))

        @cached_property
        def unlabelled(self) -> Examples | None:
            """A new client without training rows has the inputs that it wants answers for, and no others."""
            if self.client < split.num_clients or len(self.train_opted_in):
                return None
            return without_labels(self.test)

    def public() -> PublicData:
        train, validation = (examples(*rows(dataset.train, part)) for part in (split.public, split.public_validation))
        return PublicData(train, validation)

    return Federation(
        num_clients=split.num_clients,
        num_unseen=split.num_unseen,
        num_classes=dataset.num_classes,
        input_shape=dataset.input_shape,
        participants=opted.participants(split),
        global_test=examples(*rows(dataset.test, split.global_test)),
        load=cache(SplitClient) if _is_small(dataset, split) else SplitClient,
        digest=split.digest,
        vocabulary_size=getattr(dataset, "vocabulary_size", None),
        class_names=dataset.class_names,
        side_values=transform.side_values if transform else {},
        num_validation=split.num_validation,
        public=public if len(split.public) else None,
        global_validation=(
            examples(*rows(dataset.train, split.global_validation)) if len(split.global_validation) else None
        ),
        target_shape=None if dataset.num_classes else tuple(dataset.train.y.shape[1:]),
    )
