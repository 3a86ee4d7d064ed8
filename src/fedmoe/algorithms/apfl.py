"""APFL (Deng, Kamani and Mahdavi, "Adaptive personalized federated learning", 2020): a mixture of two models' weights.

A client predicts with alpha v + (1 - alpha) w: its own model v and the global model w, which is FedAvg's. In a round w
and v step together on the same batches, w along the gradient at w, v along that at the mixture (their Algorithm 1).
Records: what is sent, w after local training, sees opted-in records only. v and alpha see all records, beside the
exchange: there a second copy of w moves along with v, on all records too, and is thrown away afterwards. So the w
within the mixture is not the one that was sent, where a client has opted-out records or batches come in another order;
the paper has one w.

v starts as the first global model that a client receives and trains as `training.federated` says. After the rounds it
goes on as `training.personal` says, within the mixture with the delivered w, with early stopping. The paper ends with
the last round; but there everybody took part, while here clients that were never sampled have no v until then.
Shape suffix: S clients of a cohort.
"""

from typing import NamedTuple

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors, Tree
from fedmoe.models.mixture import shares_of_two
from fedmoe.setting_types import Fraction, PositiveFloat
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, Loss, Trainable
from fedmoe.training.mixed_weights import MixedWeightsLoss, mixed


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ApflConfig(FedAvgConfig):
    """The paper compares alpha = 0.25, 0.5 and 0.75, and its adaptive rule; the authors' FedTorch takes 0.5."""

    alpha: Fraction = 0.5  # where it stays, or where the adaptive rule starts; 0 is FedAvg, 1 local training
    alpha_rate: PositiveFloat | None = None  # step size of the adaptive rule, for the paper `training.federated`'s


class PersonalState(NamedTuple):
    model: Tensors  # v
    alpha: Tensor


def apfl(config: ApflConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg(config, setup)
    (train,) = plain.round
    return plain._replace(
        round=(
            train._replace(
                private_update=lambda b, _c, personal, data, rng: private_update(config, setup, b, personal, data, rng)
            ),
        ),
        personal_type=PersonalState,
        frequencies="own",
        init_personal=lambda b, _state, _client, _seed: PersonalState(b.model, torch.tensor(config.alpha)),
        personalize=lambda b, _c, personal, data, rng: personalize(setup, b, personal, data, rng),
        predict=lambda b, _c, personal, x: predict(setup, b, personal, x),
        expert_weights=lambda _b, _c, personal, x: shares_of_two(personal.alpha.expand(x.shape[0]), "own", "global"),
    )


def private_update(
    config: ApflConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    personal: PersonalState,
    data: ClientData,
    rng: Streams,
) -> PersonalState:
    """Algorithm 1 on all records: alpha first where it adapts, then v and a copy of w, step by step together."""
    if config.alpha_rate is not None:
        personal = personal._replace(alpha=adapted_alpha(setup, config.alpha_rate, shared, personal, data, rng))
    trainer, start_S = setup.federated, {"own": personal.model, "model": shared.model}
    groups = {
        "mixture": trainer.group(start_S, MixedWeightsLoss(setup.expert, with_model=True, task=setup.task), data.train)
    }
    fitted = trainer.fit(groups, rng, {"alpha": personal.alpha})
    return personal._replace(model=fitted.params["mixture"]["own"])


def adapted_alpha(
    setup: AlgorithmSetup, rate: float, shared: Broadcast, personal: PersonalState, data: ClientData, rng: Streams
) -> Tensor:
    """One step down d f(mixture) / d alpha = <v - w, grad f(mixture)>, on all of a client's records; within 0 and 1."""
    whole_batch = max(1, data.train.y.shape[1])
    trainer = setup.federated.with_settings(
        epochs=1,
        steps=None,
        batch_size=whole_batch,
        learning_rate=rate,
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        max_gradient_norm=None,
        rate_over_rounds=None,
        rate_over_steps=None,
    )
    group = trainer.group({"alpha": personal.alpha}, alpha_losses(setup), data.train)
    frozen = {"own": personal.model, "model": shared.model}
    fitted = trainer.fit({"mixing": group}, rng._replace(scope=f"{rng.scope}:alpha"), frozen)
    alpha_S: Tensor = fitted.params["mixing"]["alpha"].clamp(0.0, 1.0)
    return alpha_S


def alpha_losses(setup: AlgorithmSetup) -> Loss:
    """Of the mixture, as a function of alpha."""
    loss = MixedWeightsLoss(setup.expert, with_model=False, task=setup.task)

    def losses(trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        return loss.of_weights(mixed(trainable["mixing"]["alpha"], frozen["own"], frozen["model"]), batch)

    return losses


def personalize(
    setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState, data: ClientData, rng: Streams
) -> PersonalState:
    """v alone goes on, within the mixture with the delivered w."""
    trainer, start_S = setup.personal, {"own": personal.model, "model": shared.model}
    loss = MixedWeightsLoss(setup.expert, with_model=False, task=setup.task)
    names = frozenset(f"own/{name}" for name in personal.model)
    groups = {"mixture": trainer.group(start_S, loss, data.train, trained_names=names)}
    stopping = trainer.early_stopping(loss, data.validation)
    fitted = trainer.fit(groups, rng, {"alpha": personal.alpha}, stopping)
    return personal._replace(model=fitted.params["mixture"]["own"])


def predict(setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState | None, x: Tensor) -> Tensor:
    model = mixed(personal.alpha, personal.model, shared.model) if personal else shared.model
    return setup.predict(model, x)
