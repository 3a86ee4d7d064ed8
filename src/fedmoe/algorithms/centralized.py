"""Centralised training: all opted-in records in one place. What federation is measured against.

It gives up what federation is for: the records themselves leave the clients, inputs and labels, and the manifest counts
them. In the first round every client that opted in says how many records it has, then sends them; the server trains
FedAvg's initial model on all of them as one client would that had them all (`training.local`, early stopping on the
validation records of everybody) and keeps the model alone. In later rounds nobody is asked anything. Records that are
opted out stay where they are here too.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.local_only import NothingSent
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors
from fedmoe.streams import Streams
from fedmoe.training.inference import clients_of
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CentralizedConfig:
    """No settings: `training.local` says how long the server trains; `schedule.rounds = 1` is enough."""


class ServerState(NamedTuple):
    model: Tensors
    trained: Tensor  # 1 once records have arrived
    seed: Tensor


@message
class Announcement(NamedTuple):
    """What a client will send, and what the server asks it for: so the server knows what to expect."""

    num_train: Tensor
    num_validation: Tensor
    integer_inputs: Tensor  # 1 for words, 0 for real numbers


@message
class Records(NamedTuple):
    """A client's opted-in records themselves."""

    x: Tensor
    y: Tensor
    validation_x: Tensor
    validation_y: Tensor


def centralized(_config: CentralizedConfig, setup: AlgorithmSetup) -> Algorithm:
    announce = Exchange(
        name="announce",
        broadcast=lambda _server, _client, _replies: NothingSent(),
        local_update=lambda _broadcast, client, data, _rng: (client, announcement(data), NoReport()),
        aggregate=lambda server, *_: server,
        update_like=lambda _broadcast: Announcement(torch.zeros(()), torch.zeros(()), torch.zeros(())),
        broadcast_type=NothingSent,
        update_type=Announcement,
    )
    collect = Exchange(
        name="collect records",
        broadcast=lambda _server, _client, replies: replies[0],
        local_update=lambda _broadcast, client, data, _rng: (client, records_of(data), NoReport()),
        aggregate=lambda server, updates, *_: train_on_all(setup, server, updates),
        update_like=lambda asked: records_like(setup, asked),
        rejection=lambda records, _asked: records_rejection(setup, records),
        broadcast_type=Announcement,
        update_type=Records,
    )
    deliver = announce._replace(
        name="deliver", broadcast=lambda server, _client, _replies: Broadcast(server.model), broadcast_type=Broadcast
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: ServerState(
            setup.expert.init(seed, "init", "expert"), torch.tensor(0), torch.tensor(seed)
        ),
        round=(announce, collect),
        delivery=(deliver,),
        predict=lambda broadcast, _client, _personal, x: setup.predict(broadcast.model, x),
        sample=lambda server, _round, pool, _rng: pool[:0] if server.trained else pool,
        no_regression=None,
        frequencies="pool",
        no_guarantee="it sends the records themselves",
    )


def announcement(data: ClientData) -> Announcement:
    integers = torch.full(data.train.counts.shape, float(not data.train.x.is_floating_point()))
    return Announcement(data.train.counts.to(torch.float32), data.validation.counts.to(torch.float32), integers)


def records_of(data: ClientData) -> list[Records]:
    """One for each client, since clients have different numbers of them."""

    def sendable(x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x.to(torch.int64)

    both = zip(clients_of(data.train), clients_of(data.validation), strict=True)
    return [Records(sendable(train.x), train.y, sendable(held.x), held.y) for train, held in both]


def records_like(setup: AlgorithmSetup, asked: Announcement) -> Records:
    shape = setup.input_shape or setup.expert.input_shape or ()
    x = torch.zeros((), dtype=torch.int64 if asked.integer_inputs > 0 else torch.float32)
    y = torch.tensor(0) if setup.target_shape is None else torch.zeros(setup.target_shape)
    sizes = [max(int(size), 0) for size in (asked.num_train, asked.num_validation)]
    train, validation = ((x.expand(size, *shape), y.expand(size, *y.shape)) for size in sizes)
    return Records(*train, *validation)


def records_rejection(setup: AlgorithmSetup, records: Records) -> str | None:
    """What the model could not read would end the training of all."""
    for x, y in ((records.x, records.y), (records.validation_x, records.validation_y)):
        is_class = setup.target_shape is None
        if is_class and len(y) and not 0 <= int(y.min()) <= int(y.max()) < setup.num_classes:
            return f"its labels reach from {int(y.min())} to {int(y.max())}, but there are {setup.num_classes} classes"
        if len(y) and not x.is_floating_point():
            setup.expert(setup.expert.init("check"), x)  # raises for words beyond the vocabulary: a rejection
    return None


def train_on_all(setup: AlgorithmSetup, server: ServerState, updates: Mapping[ClientId, Records]) -> ServerState:
    """In the order of client ids: a cohort of one client that has all the records."""
    records = [update for _, update in sorted(updates.items())]
    data = ClientData(
        pooled([(one.x, one.y) for one in records]),
        pooled([(one.validation_x, one.validation_y) for one in records]),
    )
    rng, start = Streams(int(server.seed), "centralized", 1, (0,)), trees.stack([server.model])
    fitted = setup.local.train_classifier(setup.expert, start, data, rng, stop_early=True)
    return server._replace(model=trees.pick(fitted.params["model"], 0), trained=torch.tensor(1))


def pooled(parts: Sequence[tuple[Tensor, Tensor]]) -> Examples:
    x, y = (torch.cat(tensors)[None] for tensors in zip(*parts, strict=True))
    return Examples(x, y, torch.tensor([y.shape[1]]), {})
