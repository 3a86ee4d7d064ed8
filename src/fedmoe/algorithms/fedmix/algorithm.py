"""FedMix (Reisser et al. 2021): K experts learnt together, and a private gate on every client that weighs them.

Follows Algorithm 1 and, with `prune_threshold` above 0, Algorithm 2. The equations are in `models.expert_mixture`, what
a client optimises is in `objective`, gates released for clients without labels are in `release`.
Where we depart from the paper:
- A client decides once per round, with the phi that it received, which experts it prunes; so it trains what it sends.
  It reports that q(z|s) as it is: renormalised, as printed, it would never lie between 0 and the server's 0.9 eta / K.
- The server remembers the last report of every client (printed inside the loop over rounds).
- An expert that no client of the round sent keeps its weights and its moments; momentum alone would move it.
- A client without a gate (it never trained, gave no labels, and nobody released gates) weighs all experts alike.

Shape suffixes: S clients of a cohort, K all experts, H those sent to a client, C classes, F features, R rows of q.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad

from fedmoe import trees
from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.aggregation.server_optimizer import Moments, init_moments, server_step
from fedmoe.algorithms.algorithm import Algorithm, Exchange, uniform_sample
from fedmoe.algorithms.fedmix.objective import (
    blank_gate,
    condition_shares,
    in_use_of,
    mean_gate,
    num_conditions,
    num_outputs,
    posterior_part,
    private_parts,
    train_parts,
    trains_posterior,
    usage_of,
)
from fedmoe.algorithms.fedmix.personal import expert_weights, personalize, predict
from fedmoe.algorithms.fedmix.pruning import experts_sent, has_reported, usage_rejection
from fedmoe.algorithms.fedmix.release import release
from fedmoe.algorithms.fedmix.states import (
    Broadcast,
    ClientState,
    FedMixConfig,
    PersonalState,
    ServerState,
    TrainingReport,
    Update,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors
from fedmoe.errors import ConfigError, DataError
from fedmoe.models import expert_mixture as equations
from fedmoe.models.task import Regression
from fedmoe.streams import Streams


def fedmix(config: FedMixConfig, setup: AlgorithmSetup) -> Algorithm:
    require_gates_for_new_clients(config, setup)
    require_gaussian(setup)
    train = Exchange(
        name="train",
        broadcast=lambda server, client, _replies: send_experts(config, server, client),
        local_update=lambda b, c, data, rng: local_update(config, setup, b, c, data, rng),
        aggregate=lambda server, updates, *_: aggregate(config, server, updates),
        update_like=lambda b: update_like(config, b),
        rejection=lambda update, _sent: usage_rejection(update.usage),
        broadcast_type=Broadcast,
        update_type=Update,
        report_type=TrainingReport,
        observe=lambda before, after, updates, *_: observe(config, before, after, updates),
        cohort_key=lambda b: (len(b.expert_ids), bool(b.released)),
    )
    return Algorithm(
        no_guarantee="a client sends how much it uses each expert, and q, without noise",
        server_type=ServerState,
        init_server=lambda seed: init_server(config, setup, seed),
        round=(train,),
        delivery=(
            train._replace(name="deliver", broadcast=lambda server, client, _replies: deliver(config, server, client)),
        ),
        predict=lambda b, client, personal, x: predict(config, setup, b, client, personal, x),
        sample=uniform_sample(setup.clients_per_round),
        client_type=ClientState,
        init_client=lambda b, _client, _seed: init_client(config, setup, b),
        personal_type=PersonalState,
        frequencies="own",
        no_regression=None,
        personalize=lambda b, client, _personal, data, rng: personalize(config, setup, b, client, data, rng),
        release=None if config.share_gates else release(config, setup),
        expert_weights=lambda b, client, personal, x: expert_weights(config, setup, b, client, personal, x),
    )


def require_gaussian(setup: AlgorithmSetup) -> None:
    if isinstance(setup.task, Regression) and setup.task.loss != "squared":
        raise ConfigError(
            f"training.loss={setup.task.loss!r}, but FedMix maximises a likelihood, which is Gaussian in a regression: "
            "squared errors. Leave training.loss away."
        )


def require_gates_for_new_clients(config: FedMixConfig, setup: AlgorithmSetup) -> None:
    """Checked before the rounds, not after them."""
    if setup.unlabelled_new_clients and not setup.release and not config.share_gates:
        raise DataError(
            f"client {setup.unlabelled_new_clients[0]} is new and has no training examples to fit its gate to, and the "
            "gates of others are not shared. Give it labelled data, or set schedule.release = true to average them."
        )


# The server


def init_server(config: FedMixConfig, setup: AlgorithmSetup, seed: int) -> ServerState:
    """q starts uniform (Figure 14a); experts start apart, or nothing would ever tell them apart."""
    count = config.num_experts
    starts = [setup.expert.init(seed, "init", "expert", *([k] if k else [])) for k in range(count)]
    if count > 1 and all(torch.equal(leaf, starts[1][name]) for name, leaf in starts[0].items()):
        raise ConfigError(
            f"all {count} experts start with the same weights, so they would stay alike. "
            "Give a factory that makes fresh modules, such as a class or a lambda, instead of one module; with "
            "model.start_from set model.start_noise, such as 0.01."
        )
    posterior = torch.zeros(num_conditions(config, setup), count)
    gate = blank_gate(config, setup) if config.share_gates else {}
    return ServerState(
        experts=trees.stack(starts),
        expert_moments=trees.stack([init_moments(start) for start in starts]),
        posterior=posterior,
        gate=gate,
        moments=init_moments({"posterior": posterior, **gate}),
        usage=torch.zeros(setup.num_clients, count),
        released={},
    )


def send_experts(config: FedMixConfig, server: ServerState, client: ClientId) -> Broadcast:
    sent_K = experts_sent(config, server, client)
    expert_ids_H = sent_K.nonzero()[:, 0]
    experts = server.experts if sent_K.all() else trees.tree_map(lambda leaf: leaf[expert_ids_H], server.experts)
    return Broadcast(experts, expert_ids_H, server.posterior, server.gate, released={})


def deliver(config: FedMixConfig, server: ServerState, client: ClientId) -> Broadcast:
    """A client that never trained gets the gates that were released, if any."""
    sent = send_experts(config, server, client)
    return sent if has_reported(server, client) else sent._replace(released=server.released)


def update_like(config: FedMixConfig, sent: Broadcast) -> Update:
    return Update(
        sent.experts, sent.expert_ids, sent.posterior, sent.gate, torch.zeros(config.num_experts), torch.zeros(())
    )


def client_shares(num_examples_S: Tensor) -> Tensor:
    """Eq. 7: p(s) = N_s / N."""
    return num_examples_S / num_examples_S.sum().clamp_min(torch.finfo(num_examples_S.dtype).tiny)


def expert_shares(usage_SK: Tensor, num_examples_S: Tensor, sent_SK: Tensor) -> Tensor:
    """Eq. 8: p(s|z=k) (S, K) over the clients that sent expert k; a column of zeros where nobody did."""
    mass_SK = usage_SK * client_shares(num_examples_S)[:, None] * sent_SK
    return mass_SK / mass_SK.sum(0).clamp_min(torch.finfo(mass_SK.dtype).tiny)


def aggregate(config: FedMixConfig, server: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
    """The server's side of Algorithm 1: differences are taken for gradients."""
    clients = sorted(updates)
    counts_S = torch.stack([updates[c].num_examples.clamp(0, config.max_weight) for c in clients]).double()
    if not counts_S.sum():
        return server
    usage_SK = torch.stack([updates[c].usage for c in clients])
    experts_K = torch.arange(config.num_experts)
    sent_SK = torch.stack([torch.isin(experts_K, updates[c].expert_ids) for c in clients])
    shares_SK = expert_shares(usage_SK.double(), counts_S, sent_SK)
    stepped = []
    for k in range(config.num_experts):
        model, moments = trees.pick((server.experts, server.expert_moments), k)
        shares = {c: share for c, share in zip(clients, shares_SK[:, k].tolist(), strict=True) if share}
        models = {c: trees.pick(updates[c].experts, updates[c].expert_ids.tolist().index(k)) for c in shares}
        change = mean_change(models, shares, model)
        stepped.append(server_step(config.server_optimizer, model, change, moments) if models else (model, moments))
    experts, expert_moments = trees.stack(stepped)
    common, moments = step_common(config, server, updates, dict(zip(clients, counts_S.tolist(), strict=True)))
    usage = server.usage.clone()
    usage[clients] = usage_SK
    posterior = common.pop("posterior")
    return ServerState(experts, expert_moments, posterior, common, moments, usage, released={})


def mean_change(models: Mapping[ClientId, Tensors], shares: Mapping[ClientId, float], start: Tensors) -> Tensors:
    """Minus Delta of eq. 7 and 8: the mean of (client - server)."""
    return trees.tree_map(torch.sub, weighted_mean(models, shares), start) if models else {}


def step_common(
    config: FedMixConfig, server: ServerState, updates: Mapping[ClientId, Update], counts: Mapping[ClientId, float]
) -> tuple[Tensors, Moments]:
    """phi, and the gate where it is shared; phi climbs the marginal entropy too, so that no expert dies early."""
    start = {"posterior": server.posterior, **server.gate}
    change = mean_change({c: {"posterior": u.posterior, **u.gate} for c, u in updates.items()}, counts, start)
    if len(server.posterior):
        change["posterior"] = change["posterior"] + grad(equations.marginal_entropy)(server.posterior)
    return server_step(config.server_optimizer, start, change, server.moments)


def observe(
    config: FedMixConfig, before: ServerState, after: ServerState, updates: Mapping[ClientId, Update]
) -> Observation:
    """q(z|s) of every client that ever reported stands in for a q(z|y) where there is none."""
    sent = {client: ExpertSubset(update.experts, update.expert_ids) for client, update in updates.items()}
    mass = {client: update.usage * update.num_examples for client, update in updates.items()}
    if trains_posterior(config):
        return observe_experts(before.experts, sent, mass, after.posterior.softmax(-1), config.condition)
    usage = torch.where(after.usage.any(1, keepdim=True), after.usage, 1 / config.num_experts)
    return observe_experts(before.experts, sent, mass, usage, "client")


# The client


def init_client(config: FedMixConfig, setup: AlgorithmSetup, shared: Broadcast) -> ClientState:
    count = config.num_experts
    return ClientState(
        gate={} if config.share_gates else blank_gate(config, setup),
        output_bias=torch.zeros(num_outputs(setup) if config.personal_bias else 0),
        shares=torch.zeros(len(shared.posterior)),
        usage=torch.full((count,), 1 / count),
        trained=torch.zeros(()),
    )


def local_update(
    config: FedMixConfig, setup: AlgorithmSetup, shared: Broadcast, client: ClientState, data: ClientData, rng: Streams
) -> tuple[ClientState, list[Update], TrainingReport]:
    """The client's side of Algorithms 1 and 2."""
    shares_SR = condition_shares(config, shared.posterior.shape[1], data.train, rng)
    usage_SK = usage_of(config, shared.posterior, shares_SR, client.usage)
    in_use_SH = in_use_of(config, usage_SK, shared.expert_ids)
    parts = {"experts": shared.experts, **posterior_part(config, shared), **private_parts(config, shared, client)}
    frozen = {"posterior": shared.posterior, "shares": shares_SR, "expert_ids": shared.expert_ids, "in_use": in_use_SH}
    fitted = train_parts(config, setup, parts, frozen, client.usage, data, setup.federated, rng)
    trained = fitted.params["mixture"]
    own_SK = fitted.params["usage"]["share"] if config.condition == "client" else client.usage
    new = ClientState(
        gate={} if config.share_gates else trained["gate"],
        output_bias=trained.get("output_bias", client.output_bias),
        shares=shares_SR,
        usage=own_SK,
        trained=client.trained + 1,
    )
    reported_SK = own_SK if config.condition == "client" else usage_SK
    if config.objective == "mixture":
        reported_SK = mean_gate(config, setup, trained, frozen, data.train)
    update = Update(
        experts=trained["experts"],
        expert_ids=shared.expert_ids,
        posterior=trained.get("posterior", shared.posterior),
        gate=trained["gate"] if config.share_gates else {},
        usage=reported_SK,
        num_examples=data.train.counts.to(torch.float32),
    )
    updates = [only_in_use(trees.pick(update, s), in_use_H) for s, in_use_H in enumerate(in_use_SH)]
    return new, updates, TrainingReport(fitted.loss_S)


def only_in_use(update: Update, in_use_H: Tensor) -> Update:
    """A pruned expert was not trained and is not sent."""
    if in_use_H.all():
        return update
    experts = trees.tree_map(lambda leaf: leaf[in_use_H], update.experts)
    return update._replace(experts=experts, expert_ids=update.expert_ids[in_use_H])
