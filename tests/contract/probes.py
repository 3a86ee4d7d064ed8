"""Small algorithms that use every part of the contract which the catalog does not use yet.

They are shaped like papers, but are not them. A router or a gate over M experts is M copies of the gate network, one
score each. Shape suffixes: S clients of a cohort, H experts that a client holds, M or K all experts, B a batch,
C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from contract.calibrated import CALIBRATED
from fedmoe import trees
from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport, Nothing, uniform_sample
from fedmoe.algorithms.catalog import CATALOG, Entry
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.clients.federation import side_by_side
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors, Tree
from fedmoe.models.mixture import log_mix, negative_log_likelihood
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, Loss, Trainable
from fedmoe.training.classifier import ClassifierLoss, log_probs
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.inference import clients_of
from fedmoe.training.optimizers import Sgd
from fedmoe.wire import message


def scores_of(gate: Network, gates_M: Tensors, x: Tensor) -> Tensor:
    """(B, M): what each of M stacked gates says."""
    scores_MB: Tensor = vmap(lambda one: gate(one, x)[:, 0])(gates_M)  # torch.export knows no vmap with out_dims
    return scores_MB.T


def predictions_of(expert: Network, experts_H: Tensors, x: Tensor) -> Tensor:
    """(H, B, C): log-probabilities of each of H stacked experts."""
    predictions: Tensor = vmap(lambda one: F.log_softmax(expert(one, x), dim=-1))(experts_H)
    return predictions


def unchanged(server: Any, *_: Any) -> Any:
    return server


# 1. Two exchanges per round: the router goes down, a choice comes up, the chosen experts go down and come back.

NUM_EXPERTS, NUM_CHOSEN = 3, 2


@dataclass(frozen=True)
class ChosenExpertsConfig:
    router_rate: float = 0.05


class ChosenServer(NamedTuple):
    experts: Tensors  # (M, ...)
    router: Tensors  # (M, ...)


class ChosenClient(NamedTuple):
    router: Tensors  # from the first exchange, so that the second need not send it again


class ChosenPersonal(NamedTuple):
    usable: Tensor  # (H,) bool: the K of the experts held that this client prefers


@message
class RouterDown(NamedTuple):
    router: Tensors


@message
class Choice(NamedTuple):
    experts: Tensor  # (K,)


@message(experts="experts", expert_ids="expert_ids")
class ExpertsDown(NamedTuple):
    experts: Tensors  # (H, ...)
    expert_ids: Tensor  # (H,)


@message
class Trained(NamedTuple):
    experts: Tensors
    router: Tensors
    num_examples: Tensor


@message(experts="experts", expert_ids="expert_ids")
class Delivered(NamedTuple):
    router: Tensors
    experts: Tensors
    expert_ids: Tensor


def chosen_experts(config: ChosenExpertsConfig, setup: AlgorithmSetup) -> Algorithm:
    choose = Exchange(
        name="choose",
        broadcast=lambda server, _client, _replies: RouterDown(server.router),
        local_update=lambda b, c, data, _rng: choose_experts(setup, b, c, data),
        aggregate=unchanged,
        update_like=lambda _: Choice(torch.zeros(NUM_CHOSEN, dtype=torch.int64)),
        rejection=lambda choice, _sent: (
            None if 0 <= choice.experts.min() <= choice.experts.max() < NUM_EXPERTS else "no such expert"
        ),
        broadcast_type=RouterDown,
        update_type=Choice,
    )
    train = Exchange(
        name="train",
        broadcast=lambda server, client, replies: send_experts(server, held_by(client, replies)),
        local_update=lambda b, c, data, rng: train_chosen(config, setup, b, c, data, rng),
        aggregate=lambda server, updates, _, sent: average_per_expert(server, updates, sent),
        update_like=lambda b: Trained(b.experts, b_router(setup), torch.zeros(())),
        broadcast_type=ExpertsDown,
        update_type=Trained,
        cohort_key=lambda b: len(b.expert_ids),
        observe=lambda before, _after, updates, _reports, sent: observe_chosen(before, updates, sent),
    )
    deliver = Exchange(
        name="deliver",
        broadcast=lambda server, _client, replies: deliver_experts(server, replies),
        local_update=choose.local_update,
        aggregate=unchanged,
        update_like=choose.update_like,
        broadcast_type=Delivered,
        update_type=Choice,
        cohort_key=lambda b: len(b.expert_ids),
    )
    return Algorithm(
        server_type=ChosenServer,
        init_server=lambda seed: init_chosen(setup, seed),
        round=(choose, train),
        delivery=(choose._replace(name="ask"), deliver),
        predict=lambda b, _client, personal, x: predict_by_best(setup, b, personal, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=ChosenClient,
        init_client=lambda broadcast, _client, _seed: ChosenClient(broadcast.router),
        personal_type=ChosenPersonal,
        personalize=lambda b, _client, _personal, data, _rng: prefer(setup, b, data),
    )


def b_router(setup: AlgorithmSetup) -> Tensors:
    return trees.stack([setup.gate.init("like")] * NUM_EXPERTS)


def init_chosen(setup: AlgorithmSetup, seed: int) -> ChosenServer:
    """Every expert starts as the common one."""
    router = [setup.gate.init(seed, "init", "router", m) for m in range(NUM_EXPERTS)]
    common = setup.expert.init(seed, "init", "expert")
    return ChosenServer(trees.stack([common] * NUM_EXPERTS), trees.stack(router))


def is_anchor(client: ClientId) -> bool:
    """Client 0 is the anchor of expert 0: it gets that expert alone and trains the router to name it."""
    return client == 0


def held_by(client: ClientId, replies: Sequence[Choice]) -> Tensor:
    return torch.tensor([client]) if is_anchor(client) else replies[0].experts


def send_experts(server: ChosenServer, expert_ids_H: Tensor) -> ExpertsDown:
    return ExpertsDown({name: leaf[expert_ids_H] for name, leaf in server.experts.items()}, expert_ids_H)


def deliver_experts(server: ChosenServer, replies: Sequence[Choice]) -> Delivered:
    """Who was asked nothing receives all and chooses for itself."""
    expert_ids_H = replies[0].experts if replies else torch.arange(NUM_EXPERTS)
    return Delivered(server.router, *send_experts(server, expert_ids_H))


def summed_scores(setup: AlgorithmSetup, router_S: Tensors, examples: Examples) -> Tensor:
    """(S, M): the router's probabilities, summed over a client's examples; labels are not read."""

    def shares(router: Tensors, batch: Batch) -> Tensor:
        return scores_of(setup.gate, router, batch.x).softmax(-1)

    return setup.federated.per_example(shares, router_S, examples).sum(1)


def choose_experts(
    setup: AlgorithmSetup, shared: RouterDown, _client: ChosenClient, data: ClientData
) -> tuple[ChosenClient, Choice, NoReport]:
    chosen_SK = summed_scores(setup, shared.router, data.train).topk(NUM_CHOSEN).indices.sort(-1).values
    return ChosenClient(shared.router), Choice(chosen_SK), NoReport()


def train_chosen(
    config: ChosenExpertsConfig,
    setup: AlgorithmSetup,
    shared: ExpertsDown,
    client: ChosenClient,
    data: ClientData,
    rng: Streams,
) -> tuple[ChosenClient, Trained, NoReport]:
    alone = shared.expert_ids.shape[1] == 1
    mixed = chosen_losses(setup)
    groups = {
        "experts": Group(shared.experts, own_losses(setup) if alone else mixed, data.train, Sgd(0.2)),
        "router": Group(client.router, naming_losses(setup) if alone else mixed, data.train, Sgd(config.router_rate)),
    }
    fitted = setup.federated.fit(groups, rng, frozen={"expert_ids": shared.expert_ids}).params
    counts_S = data.train.counts.to(torch.float32)
    return client, Trained(fitted["experts"], fitted["router"], counts_S), NoReport()


def chosen_losses(setup: AlgorithmSetup) -> Loss:
    """-log of sum_i g_i f_i over the experts held; g is the softmax over all M."""

    def losses(trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        log_gate_BM = F.log_softmax(scores_of(setup.gate, trainable["router"], batch.x), dim=-1)
        log_gate_HB = log_gate_BM.T[frozen["expert_ids"]]
        predictions_HBC = predictions_of(setup.expert, trainable["experts"], batch.x)
        return negative_log_likelihood((log_gate_HB[..., None] + predictions_HBC).logsumexp(0), batch.y)

    return losses


def own_losses(setup: AlgorithmSetup) -> Loss:
    def losses(trainable: Trainable, _frozen: Tree, batch: Batch) -> Tensor:
        return negative_log_likelihood(predictions_of(setup.expert, trainable["experts"], batch.x)[0], batch.y)

    return losses


def naming_losses(setup: AlgorithmSetup) -> Loss:
    """Cross-entropy of the router to the index of the anchor's expert."""

    def losses(trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        log_gate_BM = F.log_softmax(scores_of(setup.gate, trainable["router"], batch.x), dim=-1)
        return -log_gate_BM.T[frozen["expert_ids"]][0]

    return losses


def average_per_expert(
    server: ChosenServer, updates: Mapping[ClientId, Trained], sent: Mapping[ClientId, ExpertsDown]
) -> ChosenServer:
    """Each expert over the clients that trained it, the router over all."""
    weights = {client: float(update.num_examples.clamp(0, 100)) for client, update in updates.items()}
    if not sum(weights.values()):
        return server
    experts = {name: leaf.clone() for name, leaf in server.experts.items()}
    for m in range(NUM_EXPERTS):
        trained = {
            client: {name: leaf[place] for name, leaf in update.experts.items()}
            for client, update in updates.items()
            for place in (sent[client].expert_ids == m).nonzero()[:, 0].tolist()
            if weights[client]
        }
        for name, mean in (weighted_mean(trained, weights) if trained else {}).items():
            experts[name][m] = mean
    router = weighted_mean({client: update.router for client, update in updates.items()}, weights)
    return ChosenServer(experts, router)


def observe_chosen(
    before: ChosenServer, updates: Mapping[ClientId, Trained], sent: Mapping[ClientId, ExpertsDown]
) -> Observation:
    """A client's examples count for each expert that it was sent."""
    held = {client: ExpertSubset(update.experts, sent[client].expert_ids) for client, update in updates.items()}
    mass = {
        c: torch.zeros(NUM_EXPERTS).index_fill(0, sent[c].expert_ids, float(u.num_examples)) for c, u in updates.items()
    }
    return observe_experts(before.experts, held, mass)


def prefer(setup: AlgorithmSetup, shared: Delivered, data: ClientData) -> ChosenPersonal:
    scores_SH = summed_scores(setup, shared.router, data.train).gather(1, shared.expert_ids)
    best_SK = scores_SH.topk(NUM_CHOSEN).indices
    return ChosenPersonal(torch.zeros_like(scores_SH, dtype=torch.bool).scatter(1, best_SK, True))


def predict_by_best(setup: AlgorithmSetup, shared: Delivered, personal: ChosenPersonal | None, x: Tensor) -> Tensor:
    """Each example is predicted by its best-scoring expert among those held and preferred."""
    scores_BH = scores_of(setup.gate, shared.router, x)[:, shared.expert_ids]
    if personal is not None:
        scores_BH = scores_BH.masked_fill(~personal.usable, -torch.inf)
    return predictions_of(setup.expert, shared.experts, x)[scores_BH.argmax(1), torch.arange(x.shape[0])]


# 2. A general model learnt together, one minibatch per exchange; a private model and a gate evolve beside it.


@dataclass(frozen=True)
class PrivateExpertConfig:
    rate: float = 0.2


class GeneralServer(NamedTuple):
    general: Tensors


class PrivatePersonal(NamedTuple):
    private: Tensors
    gate: Tensors


@message
class General(NamedTuple):
    general: Tensors


@message
class Gradient(NamedTuple):
    gradient: Tensors


def private_expert(config: PrivateExpertConfig, setup: AlgorithmSetup) -> Algorithm:
    step = Exchange(
        name="step",
        broadcast=lambda server, _client, _replies: General(server.general),
        local_update=lambda b, c, data, rng: gradient_of_general(setup, b, c, data, rng),
        aggregate=lambda server, updates, *_: descend_general(config.rate, server, updates),
        update_like=lambda b: Gradient(b.general),
        broadcast_type=General,
        update_type=Gradient,
        private_update=lambda b, _client, personal, data, rng: evolve(config, setup, b, personal, data, rng),
    )
    return Algorithm(
        server_type=GeneralServer,
        init_server=lambda seed: GeneralServer(setup.expert.init(seed, "init", "expert")),
        round=(step,),
        delivery=(step._replace(name="deliver", private_update=None),),
        predict=lambda b, _client, personal, x: mixed_prediction(setup, b, personal, x),
        sample=uniform_sample(setup.clients_per_round),
        personal_type=PrivatePersonal,
        init_personal=lambda b, _state, client, seed: PrivatePersonal(b.general, setup.gate.init(seed, "gate", client)),
        personalize=lambda _b, _client, personal, _data, _rng: personal,
    )


def halves(examples: Examples) -> tuple[Examples, Examples]:
    """The first half of each client's records, the larger one, and the second."""
    first, second = [], []
    for one in clients_of(examples):
        middle = -(-len(one.y) // 2)
        first.append(Examples(one.x[:middle], one.y[:middle], torch.tensor(middle), {}))
        second.append(Examples(one.x[middle:], one.y[middle:], torch.tensor(len(one.y) - middle), {}))
    return side_by_side(first), side_by_side(second)


def gradient_of_general(
    setup: AlgorithmSetup, shared: General, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Gradient, NoReport]:
    """One step of length 1 from where the general model is; half of the records are the gate's."""
    group = Group(shared.general, ClassifierLoss(setup.expert), halves(data.train)[0], Sgd(1.0))
    moved = fit({"model": group}, Schedule(batch_size=4, steps=1), rng, setup.federated.backend).params["model"]
    return client, Gradient(trees.tree_map(torch.sub, shared.general, moved)), NoReport()


def descend_general(rate: float, server: GeneralServer, updates: Mapping[ClientId, Gradient]) -> GeneralServer:
    mean = weighted_mean({c: u.gradient for c, u in updates.items()}, dict.fromkeys(updates, 1.0))
    return GeneralServer(trees.tree_map(lambda leaf, grad: leaf - rate * grad, server.general, mean))


def mixed_losses(setup: AlgorithmSetup) -> Loss:
    def losses(trainable: Trainable, general: Tree, batch: Batch) -> Tensor:
        gate_B1 = setup.gate(trainable["gate"], batch.x, training=batch.training)
        general_BC, private_BC = (log_probs(setup.expert, p, batch) for p in (general, trainable["private"]))
        return negative_log_likelihood(log_mix(gate_B1, general_BC, private_BC), batch.y)

    return losses


def evolve(
    config: PrivateExpertConfig,
    setup: AlgorithmSetup,
    shared: General,
    personal: PrivatePersonal,
    data: ClientData,
    rng: Streams,
) -> PrivatePersonal:
    def imbalance(trainable: Trainable, _frozen: Tree, batch: Batch, real_B: Tensor) -> Tensor:
        alpha_B = setup.gate(trainable["gate"], batch.x)[:, 0].sigmoid()
        return ((alpha_B * real_B).sum() / real_B.sum() - 0.5).abs()

    for_models, for_gate = halves(data.train)
    losses = mixed_losses(setup)
    groups = {
        "private": Group(personal.private, losses, for_models, Sgd(config.rate)),
        "gate": Group(personal.gate, losses, for_gate, Sgd(config.rate), batch_term=imbalance),
    }
    schedule = Schedule(batch_size=4, steps=1)
    trained = fit(groups, schedule, rng, setup.federated.backend, frozen=shared.general).params
    return PrivatePersonal(trained["private"], trained["gate"])


def mixed_prediction(setup: AlgorithmSetup, shared: General, personal: PrivatePersonal | None, x: Tensor) -> Tensor:
    general_BC = F.log_softmax(setup.expert(shared.general, x), dim=-1)
    if personal is None:
        return general_BC
    private_BC = F.log_softmax(setup.expert(personal.private, x), dim=-1)
    return log_mix(setup.gate(personal.gate, x), general_BC, private_BC)


# 3. Experts that some clients hold and others do not; a private gate that lives from round to round; a release.


@dataclass(frozen=True)
class PrunedExpertsConfig:
    num_clients: int = 6
    num_experts: int = 3
    threshold: float = 0.9  # a client is not sent an expert that it uses less than threshold / K


class PrunedServer(NamedTuple):
    experts: Tensors  # by number, then by name
    usage: Tensor  # (clients, K): what each client last reported
    gates: Tensors  # mean of the gates that clients gave away; empty without a release


class PrivateGates(NamedTuple):
    gates: Tensors  # (K, ...)


@message
class HeldExperts(NamedTuple):
    experts: Tensors
    gates: Tensors


@message
class TrainedExperts(NamedTuple):
    experts: Tensors
    usage: Tensor  # (K,)
    num_examples: Tensor


@message
class GivenGates(NamedTuple):
    gates: Tensors


def pruned_experts(config: PrunedExpertsConfig, setup: AlgorithmSetup) -> Algorithm:
    train = Exchange(
        name="train",
        broadcast=lambda server, client, _replies: send_used(config, server, client),
        local_update=lambda b, c, data, rng: train_held(setup, b, c, data, rng),
        aggregate=lambda server, updates, *_: average_by_usage(server, updates),
        update_like=lambda b: TrainedExperts(b.experts, torch.zeros(config.num_experts), torch.zeros(())),
        broadcast_type=HeldExperts,
        update_type=TrainedExperts,
        cohort_key=lambda b: tuple(b.experts),
        observe=lambda before, after, updates, *_: observe_pruned(before, after, updates),
    )
    release_gates = Exchange(
        name="release gates",
        broadcast=lambda _server, _client, _replies: HeldExperts({}, {}),
        local_update=lambda _b, client, _data, _rng: (client, GivenGates(client.gates), NoReport()),
        aggregate=lambda server, updates, *_: server._replace(gates=mean_gates(updates)),
        update_like=lambda _: GivenGates(fresh_gates(config, setup, "like")),
        broadcast_type=HeldExperts,
        update_type=GivenGates,
    )
    return Algorithm(
        server_type=PrunedServer,
        init_server=lambda seed: init_pruned(config, setup, seed),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, client, personal, x: mix_held(setup, b, personal or client, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=PrivateGates,
        init_client=lambda broadcast, client, seed: PrivateGates(
            broadcast.gates or fresh_gates(config, setup, seed, "gates", client)
        ),
        personal_type=PrivateGates,
        personalize=lambda b, client, _personal, data, rng: fit_gates(setup, b, client, data, rng),
        release=release_gates,
    )


def fresh_gates(config: PrunedExpertsConfig, setup: AlgorithmSetup, *path: int | str) -> Tensors:
    return trees.stack([setup.gate.init(*path, k) for k in range(config.num_experts)])


def init_pruned(config: PrunedExpertsConfig, setup: AlgorithmSetup, seed: int) -> PrunedServer:
    count = config.num_experts
    experts = {str(k): setup.expert.init(seed, "init", "expert", k) for k in range(count)}
    return PrunedServer(experts, torch.full((config.num_clients, count), 1 / count), {})


def send_used(config: PrunedExpertsConfig, server: PrunedServer, client: ClientId) -> HeldExperts:
    """All experts to whoever never reported; else those in use, at least the one used most."""
    if client >= config.num_clients:
        return HeldExperts(server.experts, server.gates)
    usage_K = server.usage[client]
    floor = min(config.threshold / config.num_experts, float(usage_K.max()))
    held = {str(k): server.experts[str(k)] for k, share in enumerate(usage_K.tolist()) if share >= floor}
    return HeldExperts(held, server.gates)


def held_losses(setup: AlgorithmSetup) -> Loss:
    def losses(trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        experts = trainable.get("experts", frozen)
        return negative_log_likelihood(mix(setup, experts, trainable["gates"], batch.x), batch.y)

    return losses


def mix(setup: AlgorithmSetup, experts: Tree, gates_K: Tensors, x: Tensor) -> Tensor:
    """log sum_k g_k f_k with the gate renormalised over the experts held."""
    held = sorted(experts)
    scores_BH = scores_of(setup.gate, gates_K, x)[:, [int(k) for k in held]]
    predictions_BHC = torch.stack([F.log_softmax(setup.expert(experts[k], x), dim=-1) for k in held], dim=1)
    return (F.log_softmax(scores_BH, dim=1)[..., None] + predictions_BHC).logsumexp(1)


def train_held(
    setup: AlgorithmSetup, shared: HeldExperts, client: PrivateGates, data: ClientData, rng: Streams
) -> tuple[PrivateGates, TrainedExperts, NoReport]:
    losses = held_losses(setup)
    groups = {
        "experts": Group(shared.experts, losses, data.train, Sgd(0.2)),
        "gates": Group(client.gates, losses, data.train, Sgd(0.5)),
    }
    trained = setup.federated.fit(groups, rng).params
    counts_S = data.train.counts.to(torch.float32)

    def shares(gates: Tensors, batch: Batch) -> Tensor:
        return scores_of(setup.gate, gates, batch.x).softmax(-1)

    usage_SK = setup.federated.per_example(shares, trained["gates"], data.train).sum(1) / counts_S[:, None].clamp(min=1)
    return PrivateGates(trained["gates"]), TrainedExperts(trained["experts"], usage_SK, counts_S), NoReport()


def average_by_usage(server: PrunedServer, updates: Mapping[ClientId, TrainedExperts]) -> PrunedServer:
    """Each expert over the clients that held it, weighted by how much they used it and how many examples they have."""
    usage = server.usage.clone()
    for client, update in updates.items():
        usage[client] = update.usage.clamp(0, 1)
    experts = dict(server.experts)
    for k in experts:
        weights = {c: float(u.usage[int(k)].clamp(0, 1) * u.num_examples.clamp(0, 100)) for c, u in updates.items()}
        holders = {c: u.experts[k] for c, u in updates.items() if k in u.experts and weights[c]}
        experts[k] = weighted_mean(holders, weights) if holders else experts[k]
    return server._replace(experts=experts, usage=usage)


def observe_pruned(
    before: PrunedServer, after: PrunedServer, updates: Mapping[ClientId, TrainedExperts]
) -> Observation:
    def held(experts: Tree) -> ExpertSubset:
        numbers = sorted(experts)
        return ExpertSubset(trees.stack([experts[k] for k in numbers]), torch.tensor([int(k) for k in numbers]))

    mass = {client: update.usage * update.num_examples for client, update in updates.items()}
    sent = {client: held(update.experts) for client, update in updates.items()}
    return observe_experts(held(before.experts).experts, sent, mass, after.usage, "client")


def mean_gates(updates: Mapping[ClientId, GivenGates]) -> Tensors:
    return weighted_mean({c: u.gates for c, u in updates.items()}, dict.fromkeys(updates, 1.0))


def fit_gates(
    setup: AlgorithmSetup, shared: HeldExperts, client: PrivateGates, data: ClientData, rng: Streams
) -> PrivateGates:
    """On all records, experts frozen."""
    groups = {"gates": Group(client.gates, held_losses(setup), data.train, Sgd(0.5))}
    trained = setup.personal.fit(groups, rng, frozen=shared.experts).params
    return PrivateGates(trained["gates"])


def mix_held(setup: AlgorithmSetup, shared: HeldExperts, own: PrivateGates, x: Tensor) -> Tensor:
    return mix(setup, shared.experts, own.gates, x)


PROBES = {
    "chosen_experts": Entry(ChosenExpertsConfig, chosen_experts, "Chosen experts", None),
    "private_expert": Entry(PrivateExpertConfig, private_expert, "Private expert", None),
    "pruned_experts": Entry(PrunedExpertsConfig, pruned_experts, "Pruned experts", None),
    **CALIBRATED,
}
# Of tests that take every algorithm: `make test` has the catalog, `make slow` these too.
EVERY_NAME = [*CATALOG, *(pytest.param(name, marks=pytest.mark.slow) for name in PROBES)]
