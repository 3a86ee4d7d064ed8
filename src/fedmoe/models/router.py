"""A router over embeddings: which of M experts suits an example, and which suit a client (Dun et al. 2023, Section 4).

Shape suffixes: S clients of a cohort, N examples, B a batch, M all experts, H those that a client holds, F features.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.models.network import Network

DECIMALS = 6  # of mean scores: what backends and machines agree on; beyond them the lower index is taken


def router_network(num_features: int, num_experts: int, hidden: int) -> Network:
    """A two-layer MLP; its scores are unnormalised."""

    def make() -> nn.Module:
        layers = {"first": nn.Linear(num_features, hidden), "relu": nn.ReLU(), "second": nn.Linear(hidden, num_experts)}
        return nn.Sequential(OrderedDict(layers))

    return Network(make, "router", (num_features,))


def log_scores(router: Network, params: Tensors, embedding_BF: Tensor) -> Tensor:
    """log g(x) (B, M): log-softmax over all M experts."""
    return F.log_softmax(router(params, embedding_BF), dim=-1)


def mean_scores(scores_SNM: Tensor, counts_S: Tensor) -> Tensor:
    """(S, M): the summed scores of a client's examples, by their number, which ranks experts alike; padding is 0."""
    return scores_SNM.double().sum(1) / counts_S.clamp(min=1)[:, None]


def top_experts(scores_SM: Tensor, number: int) -> Tensor:
    """(S, number): the best experts, best first; of those that tie the lower index, so that all engines agree.

    >>> top_experts(torch.tensor([[0.2, 0.4, 0.4]]), 2)
    tensor([[1, 2]])
    """
    return scores_SM.round(decimals=DECIMALS).sort(dim=-1, descending=True, stable=True).indices[:, :number]


def best_held(log_scores_BM: Tensor, expert_ids_H: Tensor, usable_H: Tensor | None = None) -> Tensor:
    """(B,): the place among the H experts held of the usable one that scores best; the lower index where two tie."""
    order_H = expert_ids_H.argsort()
    scores_BH = log_scores_BM[:, expert_ids_H[order_H]]
    if usable_H is not None:
        scores_BH = scores_BH.masked_fill(~usable_H[order_H], -torch.inf)
    return order_H[scores_BH.argmax(1)]


def confidence(log_scores_BM: Tensor, expert_ids_H: Tensor) -> Tensor:
    """(B,): what the router gives to the expert that answers."""
    return log_scores_BM[:, expert_ids_H].amax(1).exp()
