"""SCAFFOLD (Karimireddy et al., "Stochastic controlled averaging for federated learning", 2020).

Clients whose data differ pull the model apart when they take many steps. Each client keeps a control variate c_i, an
estimate of its own gradient, the server one of everybody's, c; a local step goes along g_i(y) - c_i + c. Follows
Algorithm 1 with option II for c_i and a server step size of 1. Both control variates travel and are counted: c with the
model to the clients, the change of c_i with the model back, so a round costs twice FedAvg's bytes.

Clients count alike, as in the paper, however many records they have; FedAvg weighs them by n_k. Option II
takes (x - y) / (K eta) for the mean gradient of a client's K steps, which it is for plain SGD alone: no other optimizer
is accepted.
The control variates see opted-in records only. The server knows them by adding up what it was sent.
Shape suffix: S clients of a cohort.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe import trees
from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import FedAvgConfig, TrainingReport, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors
from fedmoe.errors import ConfigError
from fedmoe.setting_types import PositiveInt
from fedmoe.streams import Streams
from fedmoe.training.settings import LocalTraining
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ScaffoldConfig:
    """The paper's experiments take plain SGD and a server step size of 1 (Section 7): there is nothing else to set."""

    validate_every: PositiveInt = 50  # as for FedAvg


@message
class Broadcast(NamedTuple):
    model: Tensors  # x
    control: Tensors  # c


@message
class Update(NamedTuple):
    model: Tensors  # y_i
    control_change: Tensors  # c_i+ - c_i


class ServerState(NamedTuple):
    model: Tensors
    control: Tensors
    best_model: Tensors
    best_loss: Tensor


class ClientState(NamedTuple):
    control: Tensors  # c_i


def scaffold(config: ScaffoldConfig, setup: AlgorithmSetup) -> Algorithm:
    require_plain_sgd(setup.federated.settings)
    plain = fedavg(FedAvgConfig(validate_every=config.validate_every), setup)
    train = plain.round[0]._replace(
        broadcast=lambda server, _client, _replies: Broadcast(server.model, server.control),
        local_update=lambda b, c, data, rng: local_update(setup, b, c, data, rng),
        aggregate=lambda server, updates, *_: aggregate(server, updates, setup.num_participants),
        update_like=lambda broadcast: Update(broadcast.model, broadcast.control),
        broadcast_type=Broadcast,
        update_type=Update,
    )
    return plain._replace(
        no_guarantee="its control variates are divided by the number of local steps, and that tells of the records",
        server_type=ServerState,
        init_server=lambda seed: init_server(setup.expert.init(seed, "init", "expert")),
        round=(train,),  # validation and delivery are FedAvg's: they need the model alone
        client_type=ClientState,
        init_client=lambda broadcast, _client, _seed: ClientState(zeros_like(broadcast.model)),
        known_to_server=frozenset({"control"}),
    )


def require_plain_sgd(settings: LocalTraining) -> None:
    if settings.optimizer != "sgd" or settings.momentum:
        named = f"sgd with momentum {settings.momentum:g}" if settings.optimizer == "sgd" else settings.optimizer
        raise ConfigError(
            f"scaffold needs plain SGD in the rounds, but training.federated asks for {named}: its control variates "
            "are mean gradients, computed from the distance that a client moved. Set training.federated.optimizer = "
            "'sgd', momentum = 0, and a learning rate for it."
        )
    if settings.max_gradient_norm is not None:
        raise ConfigError(
            f"scaffold cannot be used with training.federated.max_gradient_norm={settings.max_gradient_norm:g}: its "
            "control variates are mean gradients, and clipped ones are none. Remove the key."
        )


def zeros_like(model: Tensors) -> Tensors:
    return trees.tree_map(torch.zeros_like, model)


def init_server(model: Tensors) -> ServerState:
    return ServerState(model, zeros_like(model), model, torch.tensor(torch.inf))


def local_update(
    setup: AlgorithmSetup, shared: Broadcast, client: ClientState, data: ClientData, rng: Streams
) -> tuple[ClientState, Update, TrainingReport]:
    """Lines 7-13 of Algorithm 1."""
    trainer = setup.federated
    offset_S = trees.tree_map(lambda c, c_i: c - c_i, shared.control, client.control)
    fitted = trainer.train_classifier(setup.expert, shared.model, data, rng, stop_early=False, gradient_offset=offset_S)
    moved_S = trainer.summed_rates(num_steps(trainer.settings, data.train.counts), rng)
    change_S = control_change(shared, fitted.params["model"], moved_S)
    control_S = trees.tree_map(torch.add, client.control, change_S)
    return ClientState(control_S), Update(fitted.params["model"], change_S), TrainingReport(fitted.loss_S)


def num_steps(settings: LocalTraining, counts_S: Tensor) -> Tensor:
    """K_i: the steps that each client takes in a round."""
    if settings.steps is not None:
        return settings.steps * (counts_S > 0)
    return settings.epochs * -(-counts_S // settings.batch_size)


def control_change(shared: Broadcast, model_S: Tensors, moved_S: Tensor) -> Tensors:
    """Option II: c_i+ - c_i = (x - y_i) / (K_i eta) - c; `moved_S` is K_i eta, the sum of the rates.

    Nothing for a client without a step.
    """

    def change(x_S: Tensor, y_S: Tensor, c_S: Tensor) -> Tensor:
        length_S = moved_S.view(-1, *[1] * (x_S.dim() - 1))
        return torch.where(length_S > 0, (x_S - y_S) / length_S.clamp_min(1e-30) - c_S, 0.0)

    return trees.tree_map(change, shared.model, model_S, shared.control)


def aggregate(server: ServerState, updates: Mapping[ClientId, Update], num_participants: int) -> ServerState:
    """Lines 16-17 with a step size of 1: x is the mean of y_i over the sample, c moves by sum_i (c_i+ - c_i) / N."""
    if not updates:
        return server
    mean = weighted_mean(updates, dict.fromkeys(updates, 1.0))
    share = len(updates) / num_participants
    control = {name: c + share * mean.control_change[name] for name, c in server.control.items()}
    return server._replace(model=mean.model, control=control)
