"""A client's stack of prior-free scores, and its choice among candidates, on two halves of its validation data.

The scores of the experts are added up with weights, near to the shared expert's alone: where clients differ in their
labels only, the prior says it all and nothing need be learnt; where they differ otherwise, a specialist gets weight.
Shape suffixes: N examples of one client, K experts, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.clients.federation import side_by_side, take
from fedmoe.core_types import Examples
from fedmoe.streams import Streams
from fedmoe.training.inference import clients_of

NEWTON_STEPS = 20
LONGEST_STEP = 1.0  # of Newton's, far from the optimum


def halves(validation: Examples, rng: Streams) -> tuple[Examples, Examples]:
    """Each client's validation rows, shuffled and cut in two; of an odd number the first half has one more."""
    first, second = [], []
    for own, generator in zip(clients_of(validation), rng.generators("halves"), strict=True):
        order = torch.randperm(len(own.y), generator=generator)
        middle = (len(order) + 1) // 2
        first.append(take(own, order[:middle].sort().values))
        second.append(take(own, order[middle:].sort().values))
    return side_by_side(first), side_by_side(second)


def stacked(scores_KNC: Tensor, weights_K: Tensor) -> Tensor:
    """(N, C): the weighted sum of the experts' scores."""
    return torch.einsum("knc,k->nc", scores_KNC, weights_K)


def fit_weights(scores_KNC: Tensor, log_prior_C: Tensor, y_N: Tensor, pull: float) -> Tensor:
    """(K,): minimise the summed cross-entropy + pull / 2 |w - (1, 0, ..., 0)|^2, the shared expert being the first.

    The objective is convex in the weights; Newton's steps, shortened where they are long. No rows: the shared alone.
    """
    scores_KNC, log_prior_C = scores_KNC.double(), log_prior_C.double()
    shared_K = F.one_hot(torch.tensor(0), len(scores_KNC)).double()
    weights_K = shared_K
    for _ in range(NEWTON_STEPS if len(y_N) else 0):
        expected_NC = F.softmax(stacked(scores_KNC, weights_K) + log_prior_C, dim=-1)
        excess_NC = expected_NC - F.one_hot(y_N, expected_NC.shape[-1])
        slope_K = torch.einsum("knc,nc->k", scores_KNC, excess_NC) + pull * (weights_K - shared_K)
        centred_KNC = scores_KNC - (scores_KNC * expected_NC).sum(-1, keepdim=True)
        curvature_KK = torch.einsum("knc,lnc,nc->kl", centred_KNC, centred_KNC, expected_NC)
        step_K = torch.linalg.solve(curvature_KK + pull * torch.eye(len(weights_K)), slope_K)
        weights_K = weights_K - step_K * (LONGEST_STEP / step_K.norm().clamp_min(LONGEST_STEP))
    return weights_K.float()


def choose(losses_KN: Tensor, margin: float, default: int) -> int:
    """The candidate with the lowest mean loss, where it beats the default by `margin` standard errors, else that."""
    if losses_KN.shape[1] < 2:
        return default
    gain_KN = losses_KN[default] - losses_KN
    mean_K, error_K = gain_KN.mean(1), gain_KN.std(1) / losses_KN.shape[1] ** 0.5
    best = int(mean_K.argmax())
    return best if mean_K[best] > margin * error_K[best] else default
