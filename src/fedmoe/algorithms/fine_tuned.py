"""FedAvg, then each client trains a copy of the global model on all of its own data, with early stopping.

Eq. 5 of Listo Zec et al. (2021); the baseline that the mixtures are measured against.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Nothing, Setting
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.streams import Streams
from fedmoe.training.local import train_classifier
from fedmoe.vocabulary import ClientData, Tensors


class PersonalState(NamedTuple):
    specialist: Tensors  # w_s^k


def fine_tuned(config: FedAvgConfig, setting: Setting) -> Algorithm:
    return fedavg(config, setting)._replace(
        personal_type=PersonalState,
        personalize=lambda b, _client, _personal, data, rng: fine_tune(setting, b, data, rng),
        predict=lambda b, c, personal, x: predict(setting, b, c, personal, x),
    )


def fine_tune(setting: Setting, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    fitted = train_classifier(
        setting.expert,
        shared.model,
        data,
        setting.personal,
        rng._replace(scope="specialist"),
        setting.way,
        stop_early=True,
    )
    return PersonalState(fitted.params["model"])


def predict(setting: Setting, shared: Broadcast, _client: Nothing, personal: PersonalState | None, x: Tensor) -> Tensor:
    return F.log_softmax(setting.expert(personal.specialist if personal else shared.model, x), dim=-1)
