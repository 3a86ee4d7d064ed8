"""The common expert alone, a baseline of Dun et al. (2023): nobody trains, and everybody is answered by it.

With `estimate_prior` a client then estimates its label frequencies from its unlabelled inputs, and the answers count
with them: a client with few labels gains by that alone, without any expert. The common expert is taken to be calibrated
(its file's temperature) and to have learnt from as many examples of each class, as `fedmoe pretrain` has it.
Shape suffixes: B examples, C classes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Nothing, uniform_sample
from fedmoe.algorithms.fedjets.states import require_common
from fedmoe.algorithms.label_priors.estimate import EstimateConfig, estimate_prior
from fedmoe.algorithms.label_priors.frequencies import uniform
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData
from fedmoe.models.common_expert import CommonExpert
from fedmoe.training.inference import CHUNK, clients_of
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CommonExpertConfig:
    estimate_prior: bool = False  # answer with label frequencies that a client estimates from its inputs


@message
class NothingSent(NamedTuple):
    """The common expert is a constant that clients have, so nothing is left to send."""


class PersonalState(NamedTuple):
    log_prior: Tensor  # (C,): estimated label frequencies; uniform for a client without inputs


def common_expert(config: CommonExpertConfig, setup: AlgorithmSetup) -> Algorithm:
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
    made = Algorithm(
        server_type=Nothing,
        init_server=lambda _seed: Nothing(),
        round=(),
        delivery=(deliver,),
        predict=lambda _broadcast, _client, personal, x: predict(common, personal, x),
        sample=uniform_sample(None),
        constants=common.constants,
        frequencies="pool",
        no_regression="a common expert answers with classes",
    )
    if not config.estimate_prior:
        return made
    return made._replace(
        personal_type=PersonalState,
        personalize=lambda _b, _client, _personal, data, _rng: estimate_priors(common, setup.num_classes, data),
    )


def estimate_priors(common: CommonExpert, num_classes: int, data: ClientData) -> PersonalState:
    """Of each client from its inputs, starting from nothing known of it; no label is read."""
    uniform_C = uniform(num_classes)
    priors = []
    for one in clients_of(data.inputs):
        scores = [common.log_probs(x) for x in one.x.split(CHUNK)] if len(one.y) else []
        priors.append(estimate_prior(torch.cat(scores), uniform_C, EstimateConfig()) if scores else uniform_C)
    return PersonalState(torch.stack(priors))


def predict(common: CommonExpert, personal: PersonalState | None, x: Tensor) -> Tensor:
    log_probs_BC = common.log_probs(x)
    return log_probs_BC if personal is None else F.log_softmax(log_probs_BC + personal.log_prior, dim=-1)
