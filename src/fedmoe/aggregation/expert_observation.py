"""What a server knows of its experts after a round, from what clients sent it anyway: nothing new is asked.

An algorithm with several experts gives its training exchange an `observe` that ends in `observe_experts`; the engine
keeps the result with the round. Suffixes: S clients of a round, K experts, H those that a client sent, R rows of a map.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import ClientId, Tensors

DIGITS = 4  # a share is read by people and drawn; a hundred classes by ten experts fit into a line of the metrics


class ExpertSubset(NamedTuple):
    """The experts that one client trained and sent."""

    experts: Tensors  # (H, ...)
    expert_ids: Tensor  # (H,): their numbers


class Observation(NamedTuple):
    load_K: Tensor  # each expert's share of the round's work
    usage_entropy: float  # of the experts on a client, in nats, mean over clients: 0 is one expert, log K all alike
    divergence_K: Tensor  # of the clients' updates; NaN for an expert that nobody sent
    assignment_RK: Tensor | None = None  # q(z|r), a distribution over experts in every row
    rows: str = "label"  # what a row of the assignment stands for: "label", a kind of side information, or "client"
    first_choice_K: Tensor | None = None  # of clients that choose experts, the share that likes each of them best

    def as_event(self) -> dict[str, Any]:
        """As it is written with the round; JSON has no NaN."""
        known = None if self.assignment_RK is None else {"of": self.rows, "shares": _rounded(self.assignment_RK)}
        divergence = [None if math.isnan(value) else value for value in _rounded(self.divergence_K)]
        entropy = round(self.usage_entropy, DIGITS)
        chosen = {} if self.first_choice_K is None else {"first_choice": _rounded(self.first_choice_K)}
        shares = {"load": _rounded(self.load_K), "usage_entropy": entropy}
        return {**shares, "divergence": divergence, "assignment": known, **chosen}


def observe_experts(
    before_K: Tensors,
    sent: Mapping[ClientId, ExpertSubset],
    mass: Mapping[ClientId, Tensor],
    assignment_RK: Tensor | None = None,
    rows: str = "label",
) -> Observation:
    """`before_K` is where the experts started; `mass` (K,) is how many of a client's examples count for each expert.

    In FedMix that is q(z|s) N_s; where clients choose experts, N_s for each that a client chose.
    """
    clients = sorted(sent)
    mass_SK = torch.stack([mass[client].double() for client in clients]).clamp(min=0)
    load_K = mass_SK.sum(0) / mass_SK.sum().clamp(min=torch.finfo(torch.float64).tiny)
    usage_SK = mass_SK[mass_SK.sum(1) > 0]
    usage_entropy = entropy(usage_SK / usage_SK.sum(1, keepdim=True)).mean().nan_to_num(0.0)
    divergence = [_divergence(k, before_K, [sent[c] for c in clients], mass_SK[:, k]) for k in range(len(load_K))]
    return Observation(load_K, float(usage_entropy), torch.tensor(divergence), assignment_RK, rows)


def entropy(shares_K: Tensor) -> Tensor:
    """In nats, over the last axis.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    nats: Tensor = torch.special.entr(shares_K).sum(-1)
    return nats


def gradient_divergence(moves_S: Sequence[Tensors], shares_S: Tensor) -> float:
    """How far apart clients pull the same parameters (Reisser et al. 2021, eq. 16-17): 0 together, up to 1/2 each.

    sum_ij p_i p_j (1 - cos(d_i, d_j)) / 2 for every named parameter, added up as in their Figure 1. The double sum of
    cosines is the squared length of the weighted mean of the directions, which needs no pairs. A client that left a
    parameter where it was has no direction, and does not count for it.

    >>> gradient_divergence([{"w": torch.tensor([1.0])}, {"w": torch.tensor([-2.0])}], torch.tensor([0.5, 0.5]))
    0.5
    """
    total = 0.0
    for name in moves_S[0]:
        moves_SP = torch.stack([move[name].flatten() for move in moves_S])
        lengths_S = torch.linalg.vector_norm(moves_SP, dim=1)
        shares = torch.where(lengths_S > 0, shares_S.to(lengths_S.dtype), 0.0)
        if shares.sum() > 0:
            scale_S = shares / shares.sum() / lengths_S.clamp(min=torch.finfo(lengths_S.dtype).tiny)
            total += 0.5 * (1 - float((scale_S @ moves_SP).square().sum().clamp(max=1)))
    return total


def _divergence(k: int, before_K: Tensors, sent: Sequence[ExpertSubset], mass_S: Tensor) -> float:
    """Weighted with p(s|z=k), as the expert's own aggregation is."""
    moves, masses = [], []
    for subset, mass in zip(sent, mass_S.tolist(), strict=True):
        for place in (subset.expert_ids == k).nonzero()[:, 0].tolist() if mass else ():
            moves.append({name: before_K[name][k] - leaf[place] for name, leaf in subset.experts.items()})
            masses.append(mass)
    return gradient_divergence(moves, torch.tensor(masses)) if moves else math.nan


def _rounded(values: Tensor) -> Any:
    return torch.round(values.double(), decimals=DIGITS).tolist()
