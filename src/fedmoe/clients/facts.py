"""What a run records of its federation, so that its models can be used without it: sizes and names, no record."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from fedmoe.clients.federation import Federation, examples
from fedmoe.core_types import ClientId
from fedmoe.data.tables import TableSchema
from fedmoe.errors import RunError
from fedmoe.partition.split import Indices


@dataclass(frozen=True)
class FederationFacts:
    num_clients: int
    num_unseen: int
    num_classes: int
    input_shape: tuple[int, ...]
    input_dtype: str  # of one example, as PyTorch calls it: float32
    participants: list[tuple[int, int]]  # ranges (first, last) of the clients that opted in
    class_names: tuple[str, ...]
    names: list[str] | None
    vocabulary_size: int | None
    side_values: Mapping[str, int]
    unlabelled_new_clients: tuple[ClientId, ...]
    pooled: ClientId | None
    table: dict[str, Any] | None  # `data.tables.TableSchema`
    target_shape: tuple[int, ...] | None = None  # of a regression

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(federation: Federation) -> FederationFacts:
    return FederationFacts(
        num_clients=federation.num_clients,
        num_unseen=federation.num_unseen,
        num_classes=federation.num_classes,
        input_shape=federation.input_shape,
        input_dtype=str(federation.input_dtype).removeprefix("torch."),
        participants=_ranges(federation.participants),
        class_names=federation.class_names,
        names=None if federation.names is None else list(federation.names),
        vocabulary_size=federation.vocabulary_size,
        side_values=dict(federation.side_values),
        unlabelled_new_clients=unlabelled_new_clients(federation),
        pooled=federation.pooled,
        table=None if federation.table is None else federation.table.to_dict(),
        target_shape=federation.target_shape,
    )


def read_facts(table: Any, where: str) -> FederationFacts:
    try:
        facts = TypeAdapter(FederationFacts).validate_python(table)
        getattr(torch, facts.input_dtype)
    except (ValidationError, AttributeError) as error:
        raise RunError(f"{where} is not as a run wrote it: {str(error).splitlines()[0]}. Run it again.") from error
    return facts


def unlabelled_new_clients(federation: Federation) -> tuple[ClientId, ...]:
    """By the length of their masks: nothing is read or prepared for this."""
    unseen = range(federation.num_clients, federation.num_clients + federation.num_unseen)
    return tuple(client for client in unseen if not len(federation.load(client).train_opted_in))


def federation_without_data(facts: FederationFacts) -> Federation:
    """Knows who there is; whoever asks it for a record is told that there are none."""

    def no_records(client: ClientId) -> NoReturn:
        raise RunError(
            f"the records of client {client} are not here: this run was loaded without its federation. What it left "
            "on disk is not complete, so some of it would have to be computed again: run it again with its data."
        )

    x = torch.zeros(0, *facts.input_shape, dtype=getattr(torch, facts.input_dtype))
    return Federation(
        num_clients=facts.num_clients,
        num_unseen=facts.num_unseen,
        num_classes=facts.num_classes,
        input_shape=facts.input_shape,
        participants=np.concatenate([np.arange(0), *(np.arange(a, b + 1) for a, b in facts.participants)]),
        global_test=examples(x, torch.zeros(0, dtype=torch.int64)),
        load=no_records,
        names=facts.names,
        vocabulary_size=facts.vocabulary_size,
        side_values=facts.side_values,
        pooled=facts.pooled,
        class_names=facts.class_names,
        table=None if facts.table is None else TableSchema.from_dict(facts.table),
        target_shape=facts.target_shape,
    )


def _ranges(ids: Indices) -> list[tuple[int, int]]:
    """Of sorted ids: [0, 1, 2, 5] is [(0, 2), (5, 5)]."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(ids, cuts) if len(part)]
