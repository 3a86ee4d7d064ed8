"""Federated averaging (McMahan et al. 2017), with the best round chosen on validation data.

Eq. 2 of Listo Zec et al.: w_g <- sum_k (n_k / n) w_k, over the opted-in records of the sampled clients. Every
`validate_every` rounds the *aggregated* model is scored on the validation data of participating clients, and the one
with the best mean loss is what the clients get in the end (Section 4 there).
With a `server_optimizer` it is generalised FedAvg (Reddi et al. 2021): that mean, minus w_g, is a step's direction.
Shape suffix: S clients of a cohort.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.aggregation.server_optimizer import Moments, ServerOptimizer, init_moments, server_step
from fedmoe.algorithms.algorithm import (
    Algorithm,
    Exchange,
    NoReport,
    Nothing,
    Validation,
    uniform_sample,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.local import LocalTrainer
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedAvgConfig:
    validate_every: PositiveInt = 50
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report
    server_optimizer: ServerOptimizer | None = None  # default: the weighted mean is the new model
    divergence: bool = False  # report in every round how far, and how far apart, clients pull the model


@message
class Broadcast(NamedTuple):
    model: Tensors


class ServerState(NamedTuple):
    model: Tensors  # w_g
    best_model: Tensors
    best_loss: Tensor
    moments: Moments = init_moments({})  # of the server's optimizer, where there is one


@message
class Update(NamedTuple):
    model: Tensors  # w_k
    num_examples: Tensor  # n_k


@message
class TrainingReport(NamedTuple):
    training_loss: Tensor


@message
class ValidationUpdate(NamedTuple):
    """The mean loss on a client's validation examples, and how many there are. No examples, no vote."""

    validation_loss: Tensor
    num_examples: Tensor


DIVERGED_LOSS = 1e5  # reported in place of NaN, infinity and anything above, since messages hold finite numbers only


def fedavg(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    train = Exchange(
        name="train",
        broadcast=send_model,
        local_update=lambda b, c, data, rng: local_update(setup.expert, setup.federated, b, c, data, rng),
        aggregate=lambda server, updates, *_: aggregate(server, updates, config.max_weight, config.server_optimizer),
        update_like=lambda broadcast: Update(broadcast.model, torch.zeros(())),
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=TrainingReport,
        observe=(lambda before, _after, updates, *_: observe(before, updates)) if config.divergence else None,
        figures=(lambda before, updates: gradient_size(setup, before, updates)) if config.divergence else None,
    )
    validate = train._replace(
        name="validate",
        local_update=lambda b, c, data, _: validate_model(setup.expert, setup.federated, b, c, data),
        aggregate=lambda server, updates, *_: keep_best(server, updates),
        update_like=lambda _: ValidationUpdate(torch.zeros(()), torch.zeros(())),
        rejection=lambda update, _sent: validation_rejection(update),
        update_type=ValidationUpdate,
        report_type=NoReport,
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: init_server(setup.expert, seed, config.server_optimizer),
        round=(train,),
        delivery=(train._replace(name="deliver", broadcast=send_best_model),),
        predict=lambda broadcast, _client, _personal, x: setup.predict(broadcast.model, x),
        sample=uniform_sample(setup.clients_per_round),
        validation=Validation(validate, config.validate_every),
        no_regression=None,
        frequencies="pool",
        no_guarantee=None,
    )


def gradient_size(setup: AlgorithmSetup, before: ServerState, updates: Mapping[ClientId, Update]) -> dict[str, float]:
    """The mean norm of what clients sent, as a gradient: how far they moved the model, by the rate of a step.

    Peterson, Kanani and Marathe (2019), Figure 7.
    """
    squares = [
        sum(float((update.model[name] - leaf).double().square().sum()) for name, leaf in before.model.items())
        for update in updates.values()
    ]
    rate = setup.federated.settings.learning_rate
    return {"gradient_norm": sum(square**0.5 for square in squares) / (rate * len(squares))} if squares else {}


def init_server(network: Network, seed: int, optimizer: ServerOptimizer | None = None) -> ServerState:
    """All clients start from the same weights, as averaging needs."""
    model = network.init(seed, "init", "expert")
    return ServerState(model, model, torch.tensor(torch.inf), init_moments(model if optimizer else {}))


def send_model(server: ServerState, _client: ClientId, _replies: Sequence[Update]) -> Broadcast:
    return Broadcast(server.model)


def send_best_model(server: ServerState, _client: ClientId, _replies: Sequence[Update]) -> Broadcast:
    """The best validated round; the last one where no validation took place."""
    return Broadcast(server.best_model if server.best_loss.isfinite() else server.model)


def local_update(
    network: Network,
    trainer: LocalTrainer,
    shared: Broadcast,
    client: Nothing,
    data: ClientData,
    rng: Streams,
) -> tuple[Nothing, Update, TrainingReport]:
    fitted = trainer.train_classifier(network, shared.model, data, rng, stop_early=False)
    num_examples_S = data.train.counts.to(torch.float32)
    return client, Update(fitted.params["model"], num_examples_S), TrainingReport(fitted.loss_S)


def aggregate(
    server: ServerState,
    updates: Mapping[ClientId, Update],
    max_weight: float | None = None,
    optimizer: ServerOptimizer | None = None,
) -> ServerState:
    model, moments = move_model(server.model, server.moments, updates, max_weight, optimizer)
    return server._replace(model=model, moments=moments)


def move_model(
    model: Tensors,
    moments: Moments,
    updates: Mapping[ClientId, Update],
    max_weight: float | None,
    optimizer: ServerOptimizer | None,
) -> tuple[Tensors, Moments]:
    """Eq. 2, or the server's step towards it; the n_k that a client reports counts from 0 up to `max_weight`."""
    cap = math.inf if max_weight is None else max_weight
    weights = {client: min(max(float(update.num_examples), 0.0), cap) for client, update in updates.items()}
    if not sum(weights.values()):
        return model, moments
    mean = weighted_mean({client: update.model for client, update in updates.items()}, weights)
    if optimizer is None:
        return mean, moments
    change = {name: mean[name] - model[name] for name in model}
    return server_step(optimizer, model, change, moments)


def observe(before: ServerState, updates: Mapping[ClientId, Update]) -> Observation:
    """One expert: how far apart the clients pull it (Reisser et al. 2021, eq. 17)."""
    alone = torch.tensor([0])
    sent = {c: ExpertSubset({name: leaf[None] for name, leaf in u.model.items()}, alone) for c, u in updates.items()}
    mass = {client: update.num_examples[None] for client, update in updates.items()}
    return observe_experts({name: leaf[None] for name, leaf in before.model.items()}, sent, mass)


def validate_model(
    network: Network,
    trainer: LocalTrainer,
    shared: Broadcast,
    client: Nothing,
    data: ClientData,
    logit_offset_SC: Tensor | None = None,
) -> tuple[Nothing, ValidationUpdate, NoReport]:
    """A client without validation examples reports 0 of 0 examples; a model that diverged, `DIVERGED_LOSS`."""
    loss_S = trainer.mean_loss(network, shared.model, data.validation, logit_offset_SC)
    finite_S = loss_S.nan_to_num(DIVERGED_LOSS).clamp(max=DIVERGED_LOSS)
    counts_S = data.validation.counts
    return client, ValidationUpdate(finite_S.where(counts_S > 0, 0.0), counts_S.to(torch.float32)), NoReport()


def validation_rejection(update: ValidationUpdate) -> str | None:
    """The lowest loss chooses the model, so a client may not report less than a loss can be."""
    if update.validation_loss < 0:
        return f"its validation loss {float(update.validation_loss):.4g} is negative, which no loss ever is"
    return None


def keep_best(server: ServerState, updates: Mapping[ClientId, ValidationUpdate]) -> ServerState:
    """The mean is over clients, as the paper says, not over examples. Diverged for one client is best for nobody."""
    losses = [update.validation_loss for _, update in sorted(updates.items()) if update.num_examples > 0]
    if not losses or not all(loss < DIVERGED_LOSS for loss in losses):  # so written, a NaN fails it too
        return server
    mean = torch.stack(losses).mean()
    return server._replace(best_model=server.model, best_loss=mean) if mean < server.best_loss else server
