"""FedAvg, then each client trains a copy of the global model on all of its own data, with early stopping.

Eq. 5 of Listo Zec et al. (2021); the baseline that the mixtures are measured against.
"""

from typing import NamedTuple

from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.streams import Streams


class PersonalState(NamedTuple):
    specialist: Tensors  # w_s^k


def fine_tuned(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(config, setup)._replace(
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, rng: fine_tune(setup, b, data, rng),
        predict=lambda b, c, personal, x: predict(setup, b, c, personal, x),
    )


def fine_tune(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    here = rng._replace(scope="specialist")
    fitted = setup.personal.train_classifier(setup.expert, shared.model, data, here, stop_early=True)
    return PersonalState(fitted.params["model"])


def predict(
    setup: AlgorithmSetup, shared: Broadcast, _client: Nothing, personal: PersonalState | None, x: Tensor
) -> Tensor:
    return setup.predict(personal.specialist if personal else shared.model, x)
