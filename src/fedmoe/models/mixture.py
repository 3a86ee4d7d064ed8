"""Mixing the predictions of experts. Always of probabilities, always computed in logs.

Shape suffixes: B examples, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_mix(gate_score_B1: Tensor, log_first_BC: Tensor, log_second_BC: Tensor) -> Tensor:
    """log(h first + (1 - h) second) with h = sigmoid(gate score), by log-sum-exp.

    Mixing log-probabilities instead would be another model (a product of experts).

    >>> half = torch.log(torch.tensor([[0.5, 0.5]])); sure = torch.log(torch.tensor([[0.9, 0.1]]))
    >>> log_mix(torch.zeros(1, 1), half, sure).exp()
    tensor([[0.7000, 0.3000]])
    """
    return torch.logaddexp(F.logsigmoid(gate_score_B1) + log_first_BC, F.logsigmoid(-gate_score_B1) + log_second_BC)


def gate_shares(gate_score_B1: Tensor, first: str, second: str) -> dict[str, Tensor]:
    """h and 1 - h of each row, by the names of the two experts that `log_mix` mixes."""
    return shares_of_two(gate_score_B1[:, 0].sigmoid(), first, second)


def shares_of_two(share_B: Tensor, first: str, second: str) -> dict[str, Tensor]:
    return {first: share_B, second: 1 - share_B}


def negative_log_likelihood(log_probs_BC: Tensor, y_B: Tensor) -> Tensor:
    """One loss per example."""
    return F.nll_loss(log_probs_BC, y_B, reduction="none")
