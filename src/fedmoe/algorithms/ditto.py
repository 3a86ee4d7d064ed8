"""Ditto (Li et al., "Fair and robust federated learning through personalization", 2021).

Every client has a personal model v_k beside the global one, which is FedAvg's. In each round that it takes part in, it
trains v_k on F_k(v) + lambda / 2 |v - w_g|^2, where w_g is the global model of that round (their Algorithm 1). The
global model learns nothing from v_k.
Records: the global model sees opted-in records, the personal model all of them; it never leaves the client.

A personal model starts as the first global model that its client receives, and trains as `training.federated` says.
After the rounds it goes on as `training.personal` says, pulled to the delivered model, with early stopping. The paper
ends with the last round; but there everybody took part, while here clients that were never sampled have no personal
model until then.
Shape suffix: S clients of a cohort.
"""

from typing import NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.setting_types import NonNegativeFloat
from fedmoe.streams import Streams
from fedmoe.training.corrections import Proximal
from fedmoe.training.local import LocalTrainer


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DittoConfig(FedAvgConfig):
    """The paper's clients choose lambda out of 0.1, 1 and 2 on their validation records, without a strong attack.

    The default is its fixed value for clients with too few of them. Here lambda is the same for all clients.
    """

    personal_pull: NonNegativeFloat = 1.0  # lambda; with 0 the personal model is trained on the client alone


class PersonalState(NamedTuple):
    model: Tensors  # v_k


def ditto(config: DittoConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg(config, setup)
    (train,) = plain.round

    def goes_on(
        trainer: LocalTrainer,
        b: Broadcast,
        personal: PersonalState,
        data: ClientData,
        rng: Streams,
        *,
        stop_early: bool,
    ) -> PersonalState:
        return train_personal(setup, trainer, config.personal_pull, b, personal, data, rng, stop_early=stop_early)

    return plain._replace(
        round=(
            train._replace(
                private_update=lambda b, _c, personal, data, rng: goes_on(
                    setup.federated, b, personal, data, rng, stop_early=False
                )
            ),
        ),
        personal_type=PersonalState,
        frequencies="own",
        init_personal=lambda broadcast, _client_state, _client, _seed: PersonalState(broadcast.model),
        personalize=lambda b, _c, personal, data, rng: goes_on(setup.personal, b, personal, data, rng, stop_early=True),
        predict=lambda b, _c, personal, x: predict(setup, b, personal, x),
    )


def train_personal(
    setup: AlgorithmSetup,
    trainer: LocalTrainer,
    strength: float,
    shared: Broadcast,
    personal: PersonalState,
    data: ClientData,
    rng: Streams,
    *,
    stop_early: bool,
) -> PersonalState:
    """Steps on h_k(v; w_g) = F_k(v) + lambda / 2 |v - w_g|^2. Early stopping goes by F_k on validation records."""
    pull = Proximal(shared.model, strength)
    fitted = trainer.train_classifier(setup.expert, personal.model, data, rng, stop_early=stop_early, proximal=pull)
    return PersonalState(fitted.params["model"])


def predict(setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState | None, x: Tensor) -> Tensor:
    return setup.predict(personal.model if personal else shared.model, x)
