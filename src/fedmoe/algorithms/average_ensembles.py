"""Average ensembles, a baseline of Dun et al. (2023): two FedAvg models of two seeds, whose probabilities are averaged.

Both are trained in one run: every sampled client trains both, each with batches of its own order, and the server
averages each by itself. They start apart where weights are drawn, and alike from `model.start_from`. Two runs of FedAvg
would also sample other clients; here they share them, so that a round costs twice FedAvg's and no more.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Algorithm, Exchange, Nothing, uniform_sample
from fedmoe.algorithms.fedavg import FedAvgConfig
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId
from fedmoe.streams import Streams, derive_seed
from fedmoe.wire import message


class ServerState(NamedTuple):
    first: fedavg.ServerState
    second: fedavg.ServerState


@message
class Broadcast(NamedTuple):
    first: fedavg.Broadcast
    second: fedavg.Broadcast


@message
class Update(NamedTuple):
    first: fedavg.Update
    second: fedavg.Update


@message
class Report(NamedTuple):
    first: fedavg.TrainingReport
    second: fedavg.TrainingReport


def average_ensembles(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    """FedAvg twice, without its choice of the best round: the last round of both counts."""
    one = fedavg.fedavg(config, setup)
    (train_one,) = one.round
    train = Exchange(
        name="train",
        broadcast=lambda server, client, replies: Broadcast(*(train_one.broadcast(s, client, replies) for s in server)),
        local_update=lambda b, client, data, rng: local_update(train_one, b, client, data, rng),
        aggregate=lambda server, updates, *_: aggregate(train_one, server, updates),
        update_like=lambda b: Update(*map(train_one.update_like, b)),
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=Report,
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: ServerState(
            one.init_server(seed), one.init_server(derive_seed(seed, "second of the ensemble"))
        ),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, client, personal, x: mean_probabilities(*(one.predict(m, client, personal, x) for m in b)),
        sample=uniform_sample(setup.clients_per_round),
        frequencies="pool",
        no_regression="it averages probabilities of classes",
    )


def local_update(
    train_one: Exchange, shared: Broadcast, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, Report]:
    _, first, first_report = train_one.local_update(shared.first, client, data, rng)
    here = rng._replace(scope=f"{rng.scope}:second")
    _, second, second_report = train_one.local_update(shared.second, client, data, here)
    return client, Update(first, second), Report(first_report, second_report)


def aggregate(train_one: Exchange, server: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
    def alone(name: str) -> Any:
        return train_one.aggregate(getattr(server, name), {c: getattr(u, name) for c, u in updates.items()}, {}, {})

    return ServerState(alone("first"), alone("second"))


def mean_probabilities(first_BC: Tensor, second_BC: Tensor) -> Tensor:
    """Of two log-probabilities, as log-probabilities.

    >>> mean_probabilities(torch.tensor([0.2]).log(), torch.tensor([0.6]).log()).exp()
    tensor([0.4000])
    """
    return torch.logaddexp(first_BC, second_BC) - math.log(2)
