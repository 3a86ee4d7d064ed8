"""FedAvg of a model one part of which never leaves its client.

What biased FedAvg (the part is the output bias) and Local/Global (the first layers) have in common. In a round a client
completes the shared part with its own, trains both together on its opted-in records, keeps its part and sends the rest.
There is no choice of a best round: the private parts have moved on since. After the rounds a client goes on with its
private part alone, on all of its records, opted in or out; that result is never sent.
Shape suffix: S clients of a cohort.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.aggregation.server_optimizer import Moments, ServerOptimizer, init_moments
from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Nothing, uniform_sample
from fedmoe.algorithms.fedavg import TrainingReport, Update, move_model
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PartialPersonalizationConfig:
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report
    server_optimizer: ServerOptimizer | None = None  # default: the weighted mean is the new shared part


@message
class Broadcast(NamedTuple):
    model: Tensors  # the shared part
    released: Tensors  # made of the private parts that clients released; empty without a release


class ServerState(NamedTuple):
    model: Tensors
    moments: Moments
    released: Tensors


class ClientState(NamedTuple):
    private: Tensors
    rounds: Tensor  # in which the private part was trained


class PersonalState(NamedTuple):
    private: Tensors
    rounds: Tensor  # the client's, and one more where it had data to go on with


@message
class ReleasedState(NamedTuple):
    """The private part, where the config allows its release; and whether it was ever trained."""

    private: Tensors
    rounds: Tensor


def partial_personalization(
    config: PartialPersonalizationConfig,
    setup: AlgorithmSetup,
    names: Collection[str],
    pool: Callable[[Sequence[Tensors]], Tensors],
) -> Algorithm:
    """`names` are the private weights; `pool` makes of released parts what new_clients get."""

    @cache  # the same for every client, so made once
    def start(seed: int) -> ClientState:
        return ClientState(part(setup.expert.init(seed, "init", "expert"), names), torch.tensor(0))

    train = Exchange(
        name="train",
        broadcast=lambda server, _client, _replies: Broadcast(server.model, server.released),
        local_update=lambda b, c, data, rng: local_update(setup, names, b, c, data, rng),
        aggregate=lambda server, updates, *_: aggregate(config, server, updates),
        update_like=lambda broadcast: Update(broadcast.model, torch.zeros(())),
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=TrainingReport,
    )
    release = Exchange(
        name="release",
        broadcast=lambda _server, _client, _replies: Broadcast({}, {}),
        local_update=lambda _b, client, _data, _rng: release_private(client),
        aggregate=lambda server, states, *_: server._replace(released=pool_released(pool, states)),
        update_like=lambda _broadcast: release_private(start(0))[1],
        broadcast_type=Broadcast,
        update_type=ReleasedState,
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: init_server(config, setup.expert, names, seed),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, c, personal, x: predict_with(setup, b, (personal or c).private, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=ClientState,
        init_client=lambda _broadcast, _client, seed: start(seed),
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, c, _personal, data, rng: fit_private(setup, b, c, data, rng),
        release=release,
        no_regression=None,
        no_guarantee=None,  # the private part is trained by noised steps, too
    )


def part(model: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name in names}


def rest(model: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name not in names}


def init_server(
    config: PartialPersonalizationConfig, network: Network, names: Collection[str], seed: int
) -> ServerState:
    """All clients start from the same weights, the private ones too: those of FedAvg with this seed."""
    model = rest(network.init(seed, "init", "expert"), names)
    return ServerState(model, init_moments(model if config.server_optimizer else {}), {})


def local_update(
    setup: AlgorithmSetup,
    names: Collection[str],
    shared: Broadcast,
    client: ClientState,
    data: ClientData,
    rng: Streams,
) -> tuple[ClientState, Update, TrainingReport]:
    """FedAvg's, on the completed model; the private part stays here."""
    whole = fedavg.Broadcast({**shared.model, **client.private})
    _, update, report = fedavg.local_update(setup.expert, setup.federated, whole, Nothing(), data, rng)
    own = ClientState(part(update.model, names), client.rounds + (data.train.counts > 0))
    return own, update._replace(model=rest(update.model, names)), report


def aggregate(
    config: PartialPersonalizationConfig, server: ServerState, updates: Mapping[ClientId, Update]
) -> ServerState:
    model, moments = move_model(server.model, server.moments, updates, config.max_weight, config.server_optimizer)
    return server._replace(model=model, moments=moments)


def release_private(client: ClientState) -> tuple[ClientState, ReleasedState, NoReport]:
    return client, ReleasedState(client.private, client.rounds), NoReport()


def pool_released(pool: Callable[[Sequence[Tensors]], Tensors], states: Mapping[ClientId, ReleasedState]) -> Tensors:
    """Of the clients that trained: the others could only return what everyone starts from."""
    trained = [state.private for _, state in sorted(states.items()) if state.rounds > 0]
    return pool(trained) if trained else {}


def fit_private(
    setup: AlgorithmSetup, shared: Broadcast, client: ClientState, data: ClientData, rng: Streams
) -> PersonalState:
    """Train the private part with the shared one frozen, on all records, with early stopping."""
    whole_S, names = {**shared.model, **client.private}, client.private.keys()
    fitted = setup.personal.train_classifier(setup.expert, whole_S, data, rng, stop_early=True, trained_names=names)
    return PersonalState(part(fitted.params["model"], names), client.rounds + (data.train.counts > 0))


def predict_with(setup: AlgorithmSetup, shared: Broadcast, private: Tensors, x: Tensor) -> Tensor:
    return setup.predict({**shared.model, **private}, x)
