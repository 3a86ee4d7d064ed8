"""FedMix for a client without labels: the gates that others gave away, averaged (Section 2.1 and appendix F).

Gates are private, so this needs `schedule.release`: one more exchange after the rounds, in the manifest like any other.
Shape suffixes: those of `fedmix_states`, S clients of a cohort, or clients that gave; B examples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Exchange, NoReport, Setting
from fedmoe.algorithms.fedmix_objective import blank_gate, usage_of
from fedmoe.algorithms.fedmix_states import ClientState, FedMixConfig, Gift, Request, ServerState
from fedmoe.models import expert_mixture as equations
from fedmoe.streams import Streams
from fedmoe.vocabulary import ClientData, ClientId, Tree


def release(config: FedMixConfig, setting: Setting) -> Exchange:
    num_biases = setting.num_classes if config.personal_bias else 0
    like = Gift(blank_gate(config, setting), torch.zeros(num_biases), torch.zeros(config.num_experts), torch.zeros(()))
    return Exchange(
        name="give gates",
        broadcast=lambda server, _client, _replies: Request(server.posterior),
        local_update=lambda request, client, data, rng: give(config, request, client, data, rng),
        aggregate=lambda server, gifts, *_: collect(config, server, gifts),
        update_like=lambda _: like,
        broadcast_type=Request,
        update_type=Gift,
    )


def give(
    config: FedMixConfig, request: Request, client: ClientState, data: ClientData, _rng: Streams
) -> tuple[ClientState, Gift, NoReport]:
    """A client that never trained has a gate that says nothing: it gives it with no weight."""
    num_examples_S = data.train.counts.to(torch.float32) * (client.trained > 0)
    usage_SK = usage_of(config, request.posterior, client.shares, client.usage)
    return client, Gift(client.gate, client.output_bias, usage_SK, num_examples_S), NoReport()


def collect(config: FedMixConfig, server: ServerState, gifts: Mapping[ClientId, Gift]) -> ServerState:
    """In the order of ids; a claim of N_s counts up to `max_weight`, as in the rounds."""
    capped = [
        gift._replace(num_examples=gift.num_examples.clamp(0, config.max_weight)) for _, gift in sorted(gifts.items())
    ]
    given = [gift._asdict() for gift in capped if gift.num_examples > 0]
    return server._replace(released=trees.stack(given) if given else {})


def log_average_gate(released: Tree, features_KBF: Tensor) -> Tensor:
    """log p(z|x) (B, K) = log sum_s p(s) p(z|x, s): each gate pools with its own q(z|s), then answers are averaged."""
    log_prior_S: Tensor = (released["num_examples"] / released["num_examples"].sum()).log()
    log_gates_SBK = torch.stack([log_gate_of(gift, features_KBF) for gift in trees.unstack(released, len(log_prior_S))])
    return (log_prior_S[:, None, None] + log_gates_SBK).logsumexp(0)


def log_gate_of(gift: Tree, features_KBF: Tensor) -> Tensor:
    everything_K = torch.ones_like(gift["usage"], dtype=torch.bool)
    return equations.log_gate(gift["gate"], equations.pooled_features(gift["usage"], everything_K, features_KBF))


def average_bias(released: Tree) -> Tensor:
    """(C,): the mean of the personal biases, by p(s)."""
    mean_C: Tensor = released["num_examples"] @ released["output_bias"] / released["num_examples"].sum()
    return mean_C
