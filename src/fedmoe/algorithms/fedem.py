"""FedEM (Marfoq et al. 2021): every client's data are a mixture of M shared components, with weights of its own.

Follows Algorithm 1 there (client-server FedEM). In a round a client takes one step of EM on its opted-in records: the
responsibilities q of the components for each example (E-step), then its mixture weights pi in closed form and local
training of all components, each example weighted with q (M-step). Components are averaged as in FedAvg, by counts of
examples; pi never leaves the client. After the rounds a client fits pi to all of its own records, opted in or out, with
the components as they are: all that a new client has to do.
Shape suffixes: S clients of a cohort, M components, N examples, B a batch, C classes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.aggregation.server_optimizer import init_moments
from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Algorithm, Exchange, uniform_sample
from fedmoe.algorithms.fedavg import TrainingReport, move_model
from fedmoe.algorithms.ifca import distinct_starts
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.local import LocalTrainer
from fedmoe.training.weighted_copies import WeightedCopiesLoss, losses_of, predictions_of
from fedmoe.wire import message

RESPONSIBILITY = "responsibility"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedEmConfig:
    """Three components, as in the paper's experiments, where a round is one local epoch."""

    num_components: PositiveInt = 3  # M
    mixture_steps: PositiveInt = 20  # of EM, by which a client fits pi to the final components
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report


class ServerState(NamedTuple):
    experts: Tensors  # (M, ...)


@message(experts="experts", expert_ids="expert_ids")
class Broadcast(NamedTuple):
    experts: Tensors  # (M, ...): the components theta_m
    expert_ids: Tensor  # (M,)


@message(experts="experts", expert_ids="expert_ids")
class Update(NamedTuple):
    experts: Tensors  # (M, ...): theta_m,t
    expert_ids: Tensor  # (M,)
    num_examples: Tensor  # n_t


class MixtureWeights(NamedTuple):
    """Private. As a client state they know opted-in records only, since q and so the update depend on them."""

    weights: Tensor  # (M,): pi_t


def fedem(config: FedEmConfig, setup: AlgorithmSetup) -> Algorithm:
    uniform = torch.full((config.num_components,), 1 / config.num_components)
    train = Exchange(
        name="train",
        broadcast=lambda server, _client, _replies: Broadcast(server.experts, torch.arange(config.num_components)),
        local_update=lambda b, client, data, rng: local_update(setup, b, client, data, rng),
        aggregate=lambda server, updates, *_: aggregate(config, server, updates),
        update_like=lambda broadcast: Update(broadcast.experts, broadcast.expert_ids, torch.zeros(())),
        rejection=components_rejection,
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=TrainingReport,
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: ServerState(distinct_starts(setup.expert, seed, config.num_components)),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, client, personal, x: predict(setup, b, (personal or client).weights, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=MixtureWeights,
        init_client=lambda _broadcast, _client, _seed: MixtureWeights(uniform),
        personal_type=MixtureWeights,
        frequencies="own",
        no_regression=None,
        no_guarantee="its mixture weights, fitted to all records without noise, are in every gradient",
        personalize=lambda b, client, _personal, data, _rng: fit_weights(config, setup, b, client, data),
        expert_weights=lambda _b, _client, personal, x: {
            f"component {m}": weight.expand(x.shape[0]) for m, weight in enumerate(personal.weights)
        },
    )


def likelihoods_of(setup: AlgorithmSetup, trainer: LocalTrainer, components_SM: Tensors, examples: Examples) -> Tensor:
    """(S, N, M): log p(y|x, m), minus the loss; zero where there is no example.

    Of a regression it is short of a constant, which is the same for all components.
    """

    def likelihoods(components_M: Tensors, batch: Batch) -> Tensor:
        return -losses_of(setup.task, setup.expert, components_M, batch)

    return trainer.per_example(likelihoods, components_SM, examples)


def responsibilities(weights_SM: Tensor, log_likelihood_SNM: Tensor) -> Tensor:
    """E-step: q(z=m) of each example, proportional to pi_m p(y|x, m)."""
    return (weights_SM.log()[:, None] + log_likelihood_SNM).softmax(-1)


def mean_responsibility(weights_SM: Tensor, q_SNM: Tensor, counts_S: Tensor) -> Tensor:
    """M-step: the new pi, the mean of q over a client's examples; as it was for a client without any."""
    real_SN = torch.arange(q_SNM.shape[1]) < counts_S[:, None]
    mean_SM = (q_SNM * real_SN[..., None]).sum(1) / counts_S.clamp(min=1)[:, None]
    return torch.where(counts_S[:, None] > 0, mean_SM, weights_SM)


def local_update(
    setup: AlgorithmSetup, shared: Broadcast, client: MixtureWeights, data: ClientData, rng: Streams
) -> tuple[MixtureWeights, Update, TrainingReport]:
    trainer, train = setup.federated, data.train
    likelihood_SNM = likelihoods_of(setup, trainer, shared.experts, train)
    q_SNM = responsibilities(client.weights, likelihood_SNM)
    weighted = train._replace(extra={**train.extra, RESPONSIBILITY: q_SNM})
    losses = WeightedCopiesLoss(setup.expert, "components", RESPONSIBILITY, setup.task)  # M-step
    group = trainer.group(shared.experts, losses, weighted)
    fitted = trainer.fit({"components": group}, rng)
    update = Update(fitted.params["components"], shared.expert_ids, train.counts.to(torch.float32))
    weights_SM = mean_responsibility(client.weights, q_SNM, train.counts)
    return MixtureWeights(weights_SM), update, TrainingReport(fitted.loss_S)


def components_rejection(update: Update, sent: Broadcast) -> str | None:
    if torch.equal(update.expert_ids, sent.expert_ids):
        return None
    return f"it holds the components {update.expert_ids.tolist()}, not {sent.expert_ids.tolist()}"


def aggregate(config: FedEmConfig, server: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
    """theta_m <- sum_t (n_t / n) theta_m,t, for every component."""
    as_models = {client: fedavg.Update(update.experts, update.num_examples) for client, update in updates.items()}
    components, _ = move_model(server.experts, init_moments({}), as_models, config.max_weight, None)
    return ServerState(components)


def fit_weights(
    config: FedEmConfig, setup: AlgorithmSetup, shared: Broadcast, client: MixtureWeights, data: ClientData
) -> MixtureWeights:
    """The components stay, so their likelihoods are computed once; every client starts from equal weights."""
    likelihood_SNM = likelihoods_of(setup, setup.personal, shared.experts, data.train)
    counts_S = data.train.counts
    weights_SM = torch.full_like(client.weights, 1 / config.num_components)
    for _ in range(config.mixture_steps):
        q_SNM = responsibilities(weights_SM, likelihood_SNM)
        weights_SM = mean_responsibility(weights_SM, q_SNM, counts_S)
    return MixtureWeights(torch.where(counts_S[:, None] > 0, weights_SM, client.weights))


def predict(setup: AlgorithmSetup, shared: Broadcast, weights_M: Tensor, x: Tensor) -> Tensor:
    """The mixture of the components' predictions."""
    batch = Batch(x, x.new_zeros(x.shape[0]), {})
    each_MBC = predictions_of(setup.task, setup.expert, shared.experts, batch)
    return setup.task.mixture(weights_M.log().expand(x.shape[0], -1), each_MBC)
