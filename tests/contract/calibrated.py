"""A probe of exchanges after the last round: FedAvg, then one temperature for everybody in a few steps of Newton.

Every client that opted in is asked several times; each exchange is aggregated before the next. Clients count how often
they were asked, so private states move on after the rounds too.
Shape suffixes: S clients of a cohort, N examples, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.algorithms import fedavg as averaging
from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport
from fedmoe.algorithms.catalog import Entry
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors
from fedmoe.training.batch import Batch
from fedmoe.wire import message


@dataclass(frozen=True)
class CalibratedConfig:
    exchanges: int = 3


class CalibratedServer(NamedTuple):
    rounds: averaging.ServerState
    scale: Tensor  # 1 / temperature


@message
class Scaled(NamedTuple):
    model: Tensors
    scale: Tensor


class TimesAsked(NamedTuple):
    rounds: Tensor
    after_rounds: Tensor


@message
class Slope(NamedTuple):
    """Of the summed loss by the scale: first and second derivative."""

    first: Tensor
    second: Tensor


def calibrated(config: CalibratedConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg(FedAvgConfig(validate_every=10**9), setup)
    train = plain.round[0]
    trained = train._replace(
        broadcast=lambda server, client, updates: train.broadcast(server.rounds, client, updates),
        local_update=lambda b, client, data, rng: (
            client._replace(rounds=client.rounds + 1),
            *train.local_update(b, None, data, rng)[1:],
        ),
        aggregate=lambda server, *messages: server._replace(rounds=train.aggregate(server.rounds, *messages)),
    )
    ask = Exchange(
        name="calibrate",
        broadcast=lambda server, _client, _updates: Scaled(server.rounds.model, server.scale),
        local_update=lambda b, client, data, _rng: slope(setup, b, client, data),
        aggregate=lambda server, updates, *_: server._replace(scale=newton(server.scale, updates)),
        update_like=lambda _broadcast: Slope(torch.zeros(()), torch.zeros(())),
        broadcast_type=Scaled,
        update_type=Slope,
    )
    return plain._replace(
        server_type=CalibratedServer,
        init_server=lambda seed: CalibratedServer(plain.init_server(seed), torch.ones(())),
        round=(trained,),
        after_rounds=tuple(ask._replace(name=f"calibrate {number}") for number in range(1, config.exchanges + 1)),
        delivery=(ask._replace(name="deliver"),),
        predict=lambda b, _client, _personal, x: F.log_softmax(b.scale * setup.expert(b.model, x), dim=-1),
        client_type=TimesAsked,
        init_client=lambda _broadcast, _client, _seed: TimesAsked(torch.tensor(0), torch.tensor(0)),
        validation=None,
    )


def slope(
    setup: AlgorithmSetup, shared: Scaled, client: TimesAsked, data: ClientData
) -> tuple[TimesAsked, Slope, NoReport]:
    """On the opted-in training records, since some clients have no validation records."""

    def logits(model: Tensors, batch: Batch) -> Tensor:
        return setup.expert(model, batch.x)

    logits_SNC = setup.federated.per_example(logits, shared.model, data.train)
    real_SN = torch.arange(data.train.y.shape[1]) < data.train.counts[:, None]
    share_SNC = F.softmax(shared.scale[:, None, None] * logits_SNC, dim=-1)
    label_SN = logits_SNC.gather(-1, data.train.y[..., None])[..., 0]
    mean_SN = (share_SNC * logits_SNC).sum(-1)
    spread_SN = (share_SNC * logits_SNC.square()).sum(-1) - mean_SN.square()
    first_S, second_S = (((mean_SN - label_SN) * real_SN).sum(1), (spread_SN * real_SN).sum(1))
    return client._replace(after_rounds=client.after_rounds + 1), Slope(first_S, second_S), NoReport()


def newton(scale: Tensor, updates: Mapping[ClientId, Slope]) -> Tensor:
    first, second = (sum(getattr(update, name) for _, update in sorted(updates.items())) for name in Slope._fields)
    return (scale - first / torch.as_tensor(second).clamp_min(1e-6)).clamp(0.01, 100.0)


CALIBRATED = {"calibrated": Entry(CalibratedConfig, calibrated, "Calibrated", None)}
