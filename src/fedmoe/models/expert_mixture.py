"""A mixture of experts whose gate reads the experts' own features: the equations of Reisser et al. (2021), FedMix.

All for one client. Shape suffixes: K all experts, H those that the client was sent, B examples, C classes, R values
that q is conditioned on (the labels, mostly), F features.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedmoe import trees
from fedmoe.core_types import Tensors
from fedmoe.models.network import Network


def expert_outputs(network: Network, experts_H: Tensors, x: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
    """Scores (H, B, C) and features (H, B, F) of the client's experts, from one forward of each."""
    if not network.can_be_mapped:
        return outputs_one_by_one(network, experts_H, x, training=training)
    outputs: tuple[Tensor, Tensor] = vmap(lambda one: network.with_features(one, x, training=training))(experts_H)
    return outputs


def outputs_one_by_one(
    network: Network, experts_H: Tensors, x: Tensor, *, training: bool = False
) -> tuple[Tensor, Tensor]:
    """The same, expert after expert; also for predictions: a batch of networks with convolutions cannot be exported."""
    count = len(next(iter(experts_H.values())))
    each = [network.with_features(one, x, training=training) for one in trees.unstack(experts_H, count)]
    scores, features = zip(*each, strict=True)
    return torch.stack(scores), torch.stack(features)


def log_posterior(logits_RK: Tensor) -> Tensor:
    """log q(z|y), a row per value of y."""
    return F.log_softmax(logits_RK, dim=-1)


def expected_usage(log_q_RK: Tensor, shares_R: Tensor) -> Tensor:
    """q(z|s), the mean of q(z|y) over the client's examples, of which `shares_R` have each value."""
    return shares_R @ log_q_RK.exp()


def experts_in_use(usage_H: Tensor, floor: float) -> Tensor:
    """(H,) bool, Algorithm 2: experts with q(z=k|s) of at least `floor`, or the one used most where none has that.

    The second half is ours: with fewer than K experts at hand, all of them may fall below the floor.
    """
    return usage_H >= usage_H.max().clamp_max(floor)


def pruned_posterior(log_q_BH: Tensor, in_use_H: Tensor) -> Tensor:
    """q'(z|y) of Algorithm 2: zero for pruned experts and renormalised over the others."""
    return log_q_BH.masked_fill(~in_use_H, -torch.inf).softmax(-1)


def pooled_features(usage_H: Tensor, in_use_H: Tensor, features_HBF: Tensor) -> Tensor:
    """Eq. 9, first line: h_s(x) = sum_k q'(z=k|s) h_k(x), q' renormalised over the experts in use."""
    kept_H = usage_H * in_use_H
    return torch.einsum("h,hbf->bf", kept_H / kept_H.sum().clamp_min(torch.finfo(kept_H.dtype).tiny), features_HBF)


def log_gate(gate: Tensors, pooled_BF: Tensor) -> Tensor:
    """Eq. 9, second line: log p(z|x, s) (B, K), a linear softmax."""
    return F.log_softmax(F.linear(pooled_BF, gate["weight"], gate["bias"]), dim=-1)


def pruned_gate(log_gate_BK: Tensor, expert_ids_H: Tensor, in_use_H: Tensor) -> Tensor:
    """The gate over the client's experts, renormalised over those in use; -inf for the others."""
    return F.log_softmax(log_gate_BK[:, expert_ids_H].masked_fill(~in_use_H, -torch.inf), dim=-1)


def log_mixture(log_gate_BH: Tensor, log_probs_HBC: Tensor) -> Tensor:
    """Eq. 2: log sum_z p(z|x, s) p(y|x, z), for every y."""
    return (log_gate_BH.T[..., None] + log_probs_HBC).logsumexp(0)


def log_likelihoods(log_probs_HBC: Tensor, y_B: Tensor) -> Tensor:
    """log p(y|x, z) at the label: (B, H)."""
    at_B1 = y_B[None, :, None].expand(len(log_probs_HBC), -1, 1)
    return log_probs_HBC.gather(-1, at_B1)[..., 0].T


def gaussian_log_likelihoods(means_HBC: Tensor, y_B: Tensor, deviation: float) -> Tensor:
    """log p(y|x, z) of numbers: (B, H). An expert predicts the mean of each, all with the same deviation."""
    distances_HBC = (y_B.reshape(means_HBC.shape[1:]) - means_HBC) / deviation
    constant = math.log(deviation * math.sqrt(2 * math.pi))
    return -(distances_HBC.square() / 2 + constant).sum(-1).T


def log_marginal(log_gate_BH: Tensor, log_likelihood_BH: Tensor) -> Tensor:
    """Eq. 3 of each example: the log-likelihood of the plain mixture."""
    return (log_gate_BH + log_likelihood_BH).logsumexp(-1)


def expected_log_joint(log_q_BK: Tensor, pruned_q_BH: Tensor, log_likelihood_BH: Tensor, log_gate_BK: Tensor) -> Tensor:
    """Eq. 6 of each example without H(q), which would make it the ELBO: E_q[log p(y|x, z) p(z|x, s)].

    The experts' term takes q' of Algorithm 2, the gate's term the whole q.
    """
    return (pruned_q_BH * log_likelihood_BH).sum(-1) + (log_q_BK.exp() * log_gate_BK).sum(-1)


def entropy(log_q: Tensor) -> Tensor:
    """H(q) over the last axis."""
    return -(log_q.exp() * log_q).sum(-1)


def marginal_entropy(logits_RK: Tensor) -> Tensor:
    """H(sum_c q(z|c) p(c)) with p(c) uniform, so that nothing about the clients' labels is asked for."""
    return entropy(log_posterior(logits_RK).logsumexp(0) - math.log(len(logits_RK)))


def closed_form_usage(log_joint_BH: Tensor, real_B: Tensor) -> Tensor:
    """Eq. 13: pi_k of a minibatch, proportional to exp of the mean of log p(y, z=k|x) over its real rows."""
    return (log_joint_BH * real_B[:, None]).sum(0).div(real_B.sum()).softmax(-1)
