"""FedJETs (Dun et al. 2023): M experts and a router on the server; each client trains the K experts that suit its data.

Follows Algorithm 1. A frozen common expert, which every client has, embeds each example once (`once_of_examples`). In a
round the router goes down and a choice comes up, the top K of its summed scores; then these experts go down, and come
back trained together with the router (`training.routed_experts`). Anchor clients, one per expert, are sent that expert
alone: they train it by itself, and the router to name it. Router and experts are averaged over those that trained them,
weighted by counts of examples as in FedAvg. A new client needs no label: it chooses as all others do, and each of its
examples is answered by the best-scoring expert among its K.
Where the paper is silent: a client that may send nothing, not even a choice, receives all M experts and chooses by
itself; g f is a mixture of probabilities. Shape suffixes: those of `models.router`, K chosen experts, C classes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.algorithms.algorithm import Algorithm, Exchange, uniform_sample
from fedmoe.algorithms.fedavg import TrainingReport
from fedmoe.algorithms.fedjets.client import choose_alone, choose_experts, expert_weights, local_update, predict
from fedmoe.algorithms.fedjets.diagnostics import measure, measured, observe_choices
from fedmoe.algorithms.fedjets.states import (
    Choice,
    ClientState,
    ExpertsDown,
    FedJetsConfig,
    Parts,
    PersonalState,
    RouterDown,
    ServerState,
    Trained,
    build_router,
    require_common,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientId, Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.router import log_scores
from fedmoe.training.routed_experts import EMBEDDING


def fedjets(config: FedJetsConfig, setup: AlgorithmSetup) -> Algorithm:
    parts = assemble(config, setup)
    choose = Exchange(
        name="choose",
        broadcast=lambda server, client, _replies: (
            None if client in parts.expert_of_anchor else RouterDown(server.router)
        ),
        local_update=lambda b, _client, data, _rng: choose_experts(parts, b, data),
        aggregate=lambda server, *_: server,
        update_like=lambda _: Choice(torch.zeros(config.num_sent, dtype=torch.int64)),
        rejection=lambda choice, _sent: choice_rejection(config, choice),
        broadcast_type=RouterDown,
        update_type=Choice,
    )
    train = Exchange(
        name="train",
        broadcast=lambda server, client, replies: send_experts(parts, server, client, replies),
        local_update=lambda b, c, data, rng: local_update(parts, b, c, data, rng),
        aggregate=lambda server, updates, *_: aggregate(config, server, updates),
        update_like=lambda b: Trained(b.experts, b.expert_ids, parts.router.init(0), torch.zeros(())),
        rejection=experts_rejection,
        broadcast_type=ExpertsDown,
        update_type=Trained,
        report_type=TrainingReport,
        cohort_key=lambda b: (bool(b.router), len(b.expert_ids)),
        observe=lambda before, _after, updates, *_: observe_choices(
            before.experts, updates, set(parts.expert_of_anchor)
        ),
    )
    return Algorithm(
        no_guarantee="a client sends which experts its records prefer, without noise",
        server_type=ServerState,
        init_server=lambda seed: init_server(parts, seed),
        round=(choose, train),
        delivery=(
            choose._replace(name="ask", broadcast=lambda server, _client, _replies: RouterDown(server.router)),
            train._replace(name="deliver", broadcast=lambda server, _client, replies: deliver(parts, server, replies)),
        ),
        predict=lambda b, _client, personal, x: predict(parts, b, personal, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=ClientState,
        known_to_server=frozenset({"router"}),
        init_client=lambda broadcast, _client, _seed: ClientState(broadcast.router),
        personal_type=PersonalState,
        personalize=lambda b, _client, _personal, data, _rng: choose_alone(parts, b, data),
        expert_weights=lambda b, _client, personal, x: expert_weights(parts, b, personal, x),
        constants=parts.common.constants,
        frequencies="own",  # those of the clients that chose the same experts, to which its own are the nearest
        no_regression="its router weighs probabilities of classes",
        once_of_examples={EMBEDDING: parts.common.embed},
        router_scores=lambda b, x: log_scores(parts.router, b.router, parts.common.embed(x)),
        measure=lambda b, _client, personal, rows: measure(
            setup.expert, parts.router, parts.common, b, None if personal is None else personal.usable, rows
        ),
        measured=measured(config.num_experts, parts.common),
    )


def assemble(config: FedJetsConfig, setup: AlgorithmSetup) -> Parts:
    if setup.anchors and len(setup.anchors) != config.num_experts:
        raise ConfigError(
            f"schedule.anchors.number={len(setup.anchors)}, but algorithm.num_experts={config.num_experts}: FedJETs "
            "has no anchors, or one for each expert. Change one of the two, or leave schedule.anchors away."
        )
    common = require_common(setup, "fedjets")
    router = build_router(setup, common, config.num_experts, config.router_hidden)
    return Parts(config, setup, common, router, {client: m for m, client in enumerate(setup.anchors)})


# The server


def init_server(parts: Parts, seed: int) -> ServerState:
    """Experts start at random, or all alike from `model.start_from`: router and anchors set them apart."""
    count = parts.config.num_experts
    starts = [parts.setup.expert.init(seed, "init", "expert", *([k] if k else [])) for k in range(count)]
    return ServerState(trees.stack(starts), parts.router.init(seed, "init", "router"))


def some_experts(server: ServerState, expert_ids_H: Tensor) -> Tensors:
    return {name: leaf[expert_ids_H] for name, leaf in server.experts.items()}


def send_experts(parts: Parts, server: ServerState, client: ClientId, replies: Sequence[Choice]) -> ExpertsDown:
    if client in parts.expert_of_anchor:
        own = torch.tensor([parts.expert_of_anchor[client]])
        return ExpertsDown(some_experts(server, own), own, server.router)
    chosen_K = replies[0].experts
    return ExpertsDown(some_experts(server, chosen_K), chosen_K, {})


def deliver(parts: Parts, server: ServerState, replies: Sequence[Choice]) -> ExpertsDown:
    """The K that a client chose; all experts for one that may not say."""
    expert_ids_H = replies[0].experts if replies else torch.arange(parts.config.num_experts)
    return ExpertsDown(some_experts(server, expert_ids_H), expert_ids_H, server.router)


def choice_rejection(config: FedJetsConfig, choice: Choice) -> str | None:
    chosen = choice.experts.tolist()
    if len(set(chosen)) == len(chosen) and all(0 <= m < config.num_experts for m in chosen):
        return None
    return f"it chose the experts {chosen}, but they are numbered 0 to {config.num_experts - 1}, each once"


def experts_rejection(update: Trained, sent: ExpertsDown) -> str | None:
    if torch.equal(update.expert_ids, sent.expert_ids):
        return None
    return f"it holds the experts {update.expert_ids.tolist()}, but was sent {sent.expert_ids.tolist()}"


def aggregate(config: FedJetsConfig, server: ServerState, updates: Mapping[ClientId, Trained]) -> ServerState:
    """The router over all, each expert over the clients that trained it; one that nobody trained stays."""
    cap = torch.inf if config.max_weight is None else config.max_weight
    weights = {client: float(update.num_examples.clamp(0, cap)) for client, update in updates.items()}
    counted = {client: update for client, update in updates.items() if weights[client]}
    if not counted:
        return server
    experts = trees.unstack(server.experts, config.num_experts)
    for m in range(config.num_experts):
        trained = {
            client: trees.pick(update.experts, update.expert_ids.tolist().index(m))
            for client, update in counted.items()
            if m in update.expert_ids.tolist()
        }
        experts[m] = weighted_mean(trained, weights) if trained else experts[m]
    router = weighted_mean({client: update.router for client, update in counted.items()}, weights)
    return ServerState(trees.stack(experts), router)
