"""IFCA (Ghosh et al. 2020): the server keeps K models, and each client belongs to the one that fits its data best.

Follows Algorithm 1 there, with model averaging: all models are broadcast, a client estimates its cluster (the lowest
mean loss on its opted-in records), trains that model and sends it with its choice. A cluster's model is the mean over
the clients that chose it, weighted by their counts of examples as in FedAvg (the paper's clients are of one size); a
cluster that nobody chose stays as it is. After the rounds every client, also one that may send nothing, receives all
models and chooses in private, on all of its own records. Before that, and without records, all models count alike.
Shape suffixes: S clients of a cohort, K models, B examples, C classes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe import trees
from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.aggregation.server_optimizer import init_moments
from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Algorithm, Exchange, Nothing, uniform_sample
from fedmoe.algorithms.fedavg import TrainingReport, move_model
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.local import LocalTrainer
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class IfcaConfig:
    """Two clusters, as on Rotated CIFAR and Federated EMNIST in the paper; Rotated MNIST has four there."""

    num_clusters: PositiveInt = 2  # K
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report


class ServerState(NamedTuple):
    experts: Tensors  # (K, ...)


@message(experts="experts", expert_ids="expert_ids")
class Broadcast(NamedTuple):
    experts: Tensors  # (K, ...)
    expert_ids: Tensor  # (K,)


@message(experts="experts", expert_ids="expert_ids")
class Update(NamedTuple):
    experts: Tensors  # (1, ...): the chosen model, trained
    expert_ids: Tensor  # (1,): the choice
    num_examples: Tensor


class PersonalState(NamedTuple):
    losses: Tensor  # (K,): of each model on all of the client's records; infinite without any


def ifca(config: IfcaConfig, setup: AlgorithmSetup) -> Algorithm:
    train = Exchange(
        name="train",
        broadcast=lambda server, _client, _replies: Broadcast(server.experts, torch.arange(config.num_clusters)),
        local_update=lambda b, _client, data, rng: local_update(setup, b, data, rng),
        aggregate=lambda server, updates, *_: aggregate(config, server, updates),
        update_like=lambda broadcast: Update(broadcast.experts, broadcast.expert_ids, torch.zeros(())),
        rejection=lambda update, _sent: choice_rejection(update),
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=TrainingReport,
        observe=lambda before, _after, updates, *_: observe(config, before, updates),
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: ServerState(distinct_starts(setup.expert, seed, config.num_clusters)),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, _client, personal, x: predict(setup, b, personal, x),
        sample=uniform_sample(setup.clients_per_round),
        personal_type=PersonalState,
        frequencies="own",  # its cluster's, to which its own are the nearest that a client knows
        no_regression=None,
        no_guarantee="a client sends which model fits its records best, without noise",
        personalize=lambda b, _client, _personal, data, _rng: PersonalState(
            losses_of(setup.expert, setup.personal, b.experts, data.train)
        ),
        expert_weights=lambda _b, _client, personal, x: {
            f"cluster {k}": share.expand(x.shape[0]) for k, share in enumerate(chosen_cluster(personal))
        },
    )


def distinct_starts(network: Network, seed: int, count: int) -> Tensors:
    """(K, ...): models that differ from the start; the first one is FedAvg's."""
    starts = [network.init(seed, "init", "expert", *([k] if k else [])) for k in range(count)]
    if count > 1 and all(torch.equal(leaf, starts[1][name]) for name, leaf in starts[0].items()):
        raise ConfigError(
            f"all {count} models start with the same weights, so no client could prefer one of them. "
            "Give a factory that makes fresh modules, such as a class or a lambda, instead of one module; with "
            "model.start_from set model.start_noise, such as 0.01."
        )
    return trees.stack(starts)


def losses_of(network: Network, trainer: LocalTrainer, experts_SK: Tensors, examples: Examples) -> Tensor:
    """(S, K): mean losses; infinite for a model that diverged, and where a client has no examples."""
    count = next(iter(experts_SK.values())).shape[1]
    models = ({name: leaf[:, k] for name, leaf in experts_SK.items()} for k in range(count))
    losses_KS = [trainer.mean_loss(network, model_S, examples) for model_S in models]
    return torch.stack(losses_KS, dim=1).nan_to_num(torch.inf, posinf=torch.inf)


def local_update(
    setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, TrainingReport]:
    """Estimate the cluster, then train its model."""
    choice_S = losses_of(setup.expert, setup.federated, shared.experts, data.train).argmin(1)
    chosen = {name: leaf[torch.arange(len(choice_S)), choice_S] for name, leaf in shared.experts.items()}
    own = fedavg.Broadcast(chosen)
    client, update, report = fedavg.local_update(setup.expert, setup.federated, own, Nothing(), data, rng)
    experts = {name: leaf[:, None] for name, leaf in update.model.items()}
    return client, Update(experts, choice_S[:, None], update.num_examples), report


def choice_rejection(update: Update) -> str | None:
    chosen = update.expert_ids.tolist()
    return None if len(chosen) == 1 else f"it holds the models {chosen}, not the one that it chose"


def aggregate(config: IfcaConfig, server: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
    """Each model is averaged over the clients that chose it."""
    models = trees.unstack(server.experts, config.num_clusters)
    for k, model in enumerate(models):
        chosen = {
            client: fedavg.Update(trees.pick(update.experts, 0), update.num_examples)
            for client, update in updates.items()
            if update.expert_ids == k
        }
        models[k], _ = move_model(model, init_moments({}), chosen, config.max_weight, None)
    return ServerState(trees.stack(models))


def observe(config: IfcaConfig, before: ServerState, updates: Mapping[ClientId, Update]) -> Observation:
    sent = {client: ExpertSubset(update.experts, update.expert_ids) for client, update in updates.items()}
    mass = {
        client: update.num_examples * F.one_hot(update.expert_ids[0], config.num_clusters)
        for client, update in updates.items()
    }
    return observe_experts(before.experts, sent, mass)


def chosen_cluster(personal: PersonalState) -> Tensor:
    """(K,): 1 for the client's own model; all alike where no data speak for one of them."""
    count = len(personal.losses)
    own_K = F.one_hot(personal.losses.argmin(), count).to(personal.losses.dtype)
    return torch.where(personal.losses.isfinite().any(), own_K, torch.full((count,), 1 / count))


def predict(setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState | None, x: Tensor) -> Tensor:
    """The client's own model; the mean of all models' predictions where no data speak for one of them."""
    if personal is not None and personal.losses.isfinite().any():
        return setup.predict(trees.pick(shared.experts, int(personal.losses.argmin())), x)
    count = len(shared.expert_ids)
    each = [setup.predict(model, x) for model in trees.unstack(shared.experts, count)]
    return setup.task.mixture(torch.full((x.shape[0], count), 1 / count).log(), torch.stack(each))
