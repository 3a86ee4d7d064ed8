"""The common expert alone, a baseline of Dun et al. (2023): nobody trains, and everybody is answered by it."""

from typing import NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Nothing, uniform_sample
from fedmoe.algorithms.fedjets.states import require_common
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CommonExpertConfig:
    pass


@message
class NothingSent(NamedTuple):
    """The common expert is a constant that clients have, so nothing is left to send."""


def common_expert(_config: CommonExpertConfig, setup: AlgorithmSetup) -> Algorithm:
    common = require_common(setup, "common_expert")
    deliver = Exchange(
        name="deliver",
        broadcast=lambda _server, _client, _replies: NothingSent(),
        local_update=lambda _broadcast, client, _data, _rng: (client, NothingSent(), NoReport()),
        aggregate=lambda server, *_: server,
        update_like=lambda _broadcast: NothingSent(),
        broadcast_type=NothingSent,
        update_type=NothingSent,
    )
    return Algorithm(
        server_type=Nothing,
        init_server=lambda _seed: Nothing(),
        round=(),
        delivery=(deliver,),
        predict=lambda _broadcast, _client, _personal, x: common.log_probs(x),
        sample=uniform_sample(None),
        constants=common.constants,
        frequencies="pool",
        no_regression="a common expert answers with classes",
    )
