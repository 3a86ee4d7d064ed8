"""Each client trains alone, from its own random start, on all of its own data. Nothing is ever sent.

Eq. 4 of Listo Zec et al. (2020): the local model f_l^k.
"""

from typing import NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Nothing, uniform_sample
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.streams import Streams
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LocalOnlyConfig:
    """No settings: `training.local` says how long a client trains."""


@message
class NothingSent(NamedTuple):
    """An empty broadcast."""


class PersonalState(NamedTuple):
    local: Tensors  # w_l^k


def local_only(_config: LocalOnlyConfig, setup: AlgorithmSetup) -> Algorithm:
    return Algorithm(
        server_type=Nothing,
        init_server=lambda _seed: Nothing(),
        round=(),
        delivery=(empty_exchange(),),
        predict=lambda _broadcast, _client, personal, x: setup.predict(personal.local, x),
        sample=uniform_sample(None),
        personal_type=PersonalState,
        frequencies="own",
        no_regression=None,
        no_guarantee=None,  # nothing is sent
        personalize=lambda _broadcast, _client, _personal, data, rng: PersonalState(train_alone(setup, data, rng)),
    )


def train_alone(setup: AlgorithmSetup, data: ClientData, rng: Streams) -> Tensors:
    """f_l^k: own random initialisation, all local data, early stopping."""
    start_S = trees.stack([setup.expert.init(seed) for seed in rng._replace(scope="local").seeds("init")])
    here = rng._replace(scope="local")
    fitted = setup.local.train_classifier(setup.expert, start_S, data, here, stop_early=True)
    local_S: Tensors = fitted.params["model"]
    return local_S


def empty_exchange() -> Exchange:
    """An exchange in which nothing is sent either way."""

    return Exchange(
        name="deliver",
        broadcast=lambda _server, _client, _replies: NothingSent(),
        local_update=lambda _broadcast, client, _data, _rng: (client, NothingSent(), NoReport()),
        aggregate=lambda server, *_: server,
        update_like=lambda _broadcast: NothingSent(),
        broadcast_type=NothingSent,
        update_type=NothingSent,
    )
