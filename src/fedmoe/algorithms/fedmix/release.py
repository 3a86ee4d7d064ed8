"""FedMix for a client without labels: the gates that others released, averaged (Section 2.1 and appendix F).

Gates are private, so this needs `schedule.release`: one more exchange after the rounds, in the manifest like any other.
Shape suffixes: those of `fedmix.states`, S clients of a cohort, or clients that released; B examples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Exchange, NoReport
from fedmoe.algorithms.fedmix.density import density_network, log_densities, train_density
from fedmoe.algorithms.fedmix.objective import blank_gate, num_outputs, usage_of
from fedmoe.algorithms.fedmix.pruning import experts_sent, usage_rejection
from fedmoe.algorithms.fedmix.states import ClientState, FedMixConfig, ReleasedState, Request, ServerState
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tree
from fedmoe.models import expert_mixture as equations
from fedmoe.models.network import Network
from fedmoe.models.vae import vae_network
from fedmoe.streams import Streams


def release(config: FedMixConfig, setup: AlgorithmSetup) -> Exchange:
    network = density_network(setup) if config.new_clients == "density" else None
    like = ReleasedState(
        blank_gate(config, setup),
        torch.zeros(num_outputs(setup) if config.personal_bias else 0),
        torch.zeros(config.num_experts),
        torch.zeros(()),
        network.init("like") if network else {},
    )
    return Exchange(
        name="release gates",
        broadcast=lambda server, _client, _replies: Request(server.posterior),
        local_update=lambda request, client, data, rng: release_gate(config, network, request, client, data, rng),
        aggregate=lambda server, states, *_: collect(config, server, states),
        update_like=lambda _: like,
        rejection=lambda released, _sent: usage_rejection(released.usage),
        broadcast_type=Request,
        update_type=ReleasedState,
    )


def release_gate(
    config: FedMixConfig,
    network: Network | None,
    request: Request,
    client: ClientState,
    data: ClientData,
    rng: Streams,
) -> tuple[ClientState, ReleasedState, NoReport]:
    """A client that never trained has a gate that says nothing: it is released with no weight."""
    num_examples_S = data.train.counts.to(torch.float32) * (client.trained > 0)
    usage_SK = usage_of(config, request.posterior, client.shares, client.usage)
    density = train_density(network, data, rng) if network else {}
    return client, ReleasedState(client.gate, client.output_bias, usage_SK, num_examples_S, density), NoReport()


def collect(config: FedMixConfig, server: ServerState, released: Mapping[ClientId, ReleasedState]) -> ServerState:
    """In the order of ids; the N_s that a client reports counts up to `max_weight`, as in the rounds."""
    used = [
        state._replace(
            usage=state.usage * experts_sent(config, server, client),
            num_examples=state.num_examples.clamp(0, config.max_weight),
        )._asdict()
        for client, state in sorted(released.items())
        if state.num_examples > 0
    ]
    if not used:
        return server
    stacked = trees.stack(used)
    return server._replace(
        released={name: part for name, part in stacked.items() if not isinstance(part, dict) or part}
    )


def log_average_gate(config: FedMixConfig, released: Tree, features_KBF: Tensor, log_shares_SB: Tensor) -> Tensor:
    """log p(z|x) (B, K) = log sum_s p(s|x) p(z|x, s): each gate with its own q(z|s); outputs are averaged."""
    states = trees.unstack(released, len(log_shares_SB))
    log_gates_SBK = torch.stack([log_gate_of(config, state, features_KBF) for state in states])
    return (log_shares_SB[..., None] + log_gates_SBK).logsumexp(0)


def log_client_shares(setup: AlgorithmSetup, released: Tree, x: Tensor) -> Tensor:
    """log p(s|x) (S, B), proportional to p(x|s) p(s) (eq. 18); p(s) alone where no densities were released."""
    log_prior_SB: Tensor = released["num_examples"].log()[:, None].expand(-1, x.shape[0])
    if "density" not in released:
        return log_prior_SB.log_softmax(0)
    return (log_densities(vae_network(setup.input_shape), released["density"], x) + log_prior_SB).log_softmax(0)


def log_gate_of(config: FedMixConfig, released: Tree, features_KBF: Tensor) -> Tensor:
    """log p(z|x, s) (B, K) as its own client computes it: over the experts that it uses, on features pooled of those.

    The usage of experts that the client was not sent is zero here, so that they are not in use either.
    """
    usage_K = released["usage"]
    in_use_K = equations.experts_in_use(usage_K, config.floor)
    log_gate_BK = equations.log_gate(released["gate"], equations.pooled_features(usage_K, in_use_K, features_KBF))
    return equations.pruned_gate(log_gate_BK, torch.arange(len(usage_K)), in_use_K)


def average_bias(released: Tree) -> Tensor:
    """(C,): the mean of the personal biases, by p(s)."""
    mean_C: Tensor = released["num_examples"] @ released["output_bias"] / released["num_examples"].sum()
    return mean_C
