"""FedProx (Li et al., "Federated optimization in heterogeneous networks", 2020): FedAvg with a proximal term.

Each client minimises F_k(w) + mu / 2 |w - w_g|^2 (their eq. 2), so that many local steps on its own kind of data do not
carry it far from the model that it was sent. Everything else is FedAvg: also the sampling and the weights n_k, where
the paper draws clients with probability n_k / n and takes a plain mean. Its variable amount of local work is no part of
this: every client trains as `training.federated` says.
"""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, TrainingReport, Update, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData
from fedmoe.setting_types import NonNegativeFloat
from fedmoe.streams import Streams
from fedmoe.training.corrections import Proximal


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedProxConfig(FedAvgConfig):
    """The paper chooses mu out of 0.001, 0.01, 0.1 and 1 for each data set.

    The default is what MOON (Li, He and Song 2021, Section 4.1) found best for FedProx on CIFAR-10.
    """

    proximal_strength: NonNegativeFloat = 0.01  # mu; 0 is FedAvg


def fedprox(config: FedProxConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg(config, setup)
    (train,) = plain.round
    pulled = train._replace(
        local_update=lambda b, c, data, rng: local_update(setup, config.proximal_strength, b, c, data, rng)
    )
    return plain._replace(round=(pulled,))


def local_update(
    setup: AlgorithmSetup, strength: float, shared: Broadcast, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, TrainingReport]:
    """Eq. 2. The reported loss is F_k alone, as for FedAvg."""
    pull = Proximal(shared.model, strength)
    fitted = setup.federated.train_classifier(setup.expert, shared.model, data, rng, stop_early=False, proximal=pull)
    return client, Update(fitted.params["model"], data.train.counts.float()), TrainingReport(fitted.loss_S)
