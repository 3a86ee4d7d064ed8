"""The label frequencies of a batch of unlabelled questions, estimated from calibrated scores.

Expectation maximisation after Saerens et al. (2002), which Alexandari et al. (2020) show to need bias-corrected
calibration and little else; here with a Dirichlet prior, since a batch may be small. Its pseudo-counts are centred on
the client's own frequencies or on uniform ones: whichever explains the batch better, with prior odds for the own.
Shape suffixes: B questions, C classes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.label_priors.frequencies import check_log_prior, uniform
from fedmoe.errors import DataError
from fedmoe.setting_types import PositiveFloat, PositiveInt


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EstimateConfig:
    pseudo_counts: PositiveFloat = 100.0  # how many questions the centre counts as
    own_odds: PositiveFloat = 9.0  # how much likelier own frequencies are than uniform ones before anything was seen
    max_iterations: PositiveInt = 200


class Estimate(NamedTuple):
    log_prior_C: Tensor
    objective: Tensor  # log-likelihood of the batch and log-density of the prior, up to a constant that centres share


CONVERGED = 1e-9  # change of the frequencies, summed


def estimate_prior(scores_BC: Tensor, own_C: Tensor, config: EstimateConfig) -> Tensor:
    """(C,) the log-prior of the questions whose prior-free scores are given.

    `own_C` is the client's own log-prior. For a single question the odds decide: it stays near the own.
    """
    if not len(scores_BC):
        raise DataError("there are no questions to estimate label frequencies from. Give a batch of at least one.")
    num_classes = scores_BC.shape[1]
    scores_BC = F.log_softmax(scores_BC.double(), dim=-1)
    own = maximum_a_posteriori(scores_BC, check_log_prior(own_C, num_classes).double(), config)
    even = maximum_a_posteriori(scores_BC, uniform(num_classes).double(), config)
    better = own if own.objective + math.log(config.own_odds) >= even.objective else even
    return better.log_prior_C.to(own_C.dtype)


def maximum_a_posteriori(scores_BC: Tensor, centre_C: Tensor, config: EstimateConfig) -> Estimate:
    """Frequencies that maximise sum_b log sum_c pi_c exp(s_bc) + sum_c a_c log(pi_c / m_c), a_c = pseudo-counts m_c."""
    pseudo_C = config.pseudo_counts * centre_C.exp()
    total = len(scores_BC) + config.pseudo_counts
    log_C = centre_C
    for _ in range(config.max_iterations):
        before_C = log_C
        log_C = ((F.softmax(scores_BC + log_C, dim=-1).sum(0) + pseudo_C) / total).log()
        if float((log_C.exp() - before_C.exp()).abs().sum()) < CONVERGED:
            break
    log_C = log_C - log_C.logsumexp(0)
    return Estimate(log_C, (scores_BC + log_C).logsumexp(-1).sum() + (pseudo_C * (log_C - centre_C)).sum())


def answer(scores_BC: Tensor, log_prior_C: Tensor) -> Tensor:
    """Log-probabilities under a prior, row by row: which questions are asked together changes nothing."""
    return F.log_softmax(scores_BC + log_prior_C, dim=-1)


def neutral_scores(log_probs_BC: Tensor, held_C: Tensor) -> Tensor:
    """Scores free of the label frequencies that an answer holds; finite for labels that it calls impossible."""
    return log_probs_BC.clamp_min(math.log(torch.finfo(log_probs_BC.dtype).tiny)) - held_C
