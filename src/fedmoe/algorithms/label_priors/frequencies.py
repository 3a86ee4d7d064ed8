"""Label frequencies of a client, as log-priors: smoothed, so that a label which a client lacks stays possible.

Shape suffixes: S clients of a cohort, N examples, C classes.
"""

import torch
from torch import Tensor

from fedmoe.core_types import Examples
from fedmoe.errors import DataError
from fedmoe.streams import Streams

TOO_CLOSE = 0.2  # summed differences of own frequencies from even ones that leave open where questions come from
SUM_TOLERANCE = 1e-3  # of the probabilities of a prior that is given: it may have been written with few digits


def label_counts(examples: Examples, num_classes: int, rng: Streams | None = None) -> Tensor:
    """(S, C): how many real examples of each client have each label.

    Where what they are for will be sent, with privacy, `rng` noises them, once: every gradient reads them, so one
    record would else change all gradients.
    """
    real_SN = torch.arange(examples.y.shape[1]) < examples.counts[:, None]
    counts_SC = torch.zeros(len(examples.y), num_classes).scatter_add(1, examples.y, real_SN.to(torch.float32))
    if rng is None or rng.private_steps is None:
        return counts_SC
    return torch.stack([rng.private_steps.noised_counts(*one) for one in zip(rng.clients, counts_SC, strict=True)])


def log_frequencies(counts_SC: Tensor) -> Tensor:
    """log((n_c + 1) / (N + C)): a distribution, uniform for a client without labels."""
    return ((counts_SC + 1) / (counts_SC.sum(-1, keepdim=True) + counts_SC.shape[-1])).log()


def shrunk_frequencies(counts_SC: Tensor) -> Tensor:
    """The log-frequencies, pulled to even ones as far as so few records call for; what answers take as a client's own.

    The James-Stein weight of Hausser & Strimmer (2009), in closed form: (1 - sum p^2) / ((N - 1) sum (1/C - p)^2), at
    most 1. What differs from even ones by chance alone goes; 300 records of which two labels hold 60% keep 97%.
    """
    num_classes = counts_SC.shape[-1]
    total_S1 = counts_SC.sum(-1, keepdim=True)
    shares_SC = counts_SC / total_S1.clamp(min=1)
    chance_S1 = 1 - shares_SC.square().sum(-1, keepdim=True)
    distance_S1 = (total_S1 - 1) * (shares_SC - 1 / num_classes).square().sum(-1, keepdim=True)
    weight_S1 = torch.where(distance_S1 > chance_S1, chance_S1 / distance_S1, 1.0)
    return (weight_S1 / num_classes + (1 - weight_S1) * log_frequencies(counts_SC).exp()).log()


def training_offset(examples: Examples, num_classes: int, rng: Streams | None = None) -> Tensor:
    """(S, C): what a client adds to its scores while it trains: its log-frequencies, shifted so that the largest is 0.

    Menon et al. (2021), logit adjustment. With equal frequencies it is exactly zero. Unsmoothed, the output weights of
    a label that a client lacks would get no gradient, and come back bit by bit as they were sent.
    """
    log_SC = log_frequencies(label_counts(examples, num_classes, rng))
    return log_SC - log_SC.amax(-1, keepdim=True)


def uniform(num_classes: int) -> Tensor:
    return log_frequencies(torch.zeros(num_classes))


def is_near(log_prior_C: Tensor, own_C: Tensor) -> Tensor:
    """Whether frequencies are about the client's own: no further from these than from even ones, in total variation.

    Those of a batch of 100 questions are off by 0.1 or so by chance, so that they tell nothing where own and even ones
    are close: whatever is asked then counts as asked at home.
    """
    prior_C, home_C, even = log_prior_C.exp(), own_C.exp(), 1 / len(log_prior_C)
    is_nearer = (prior_C - home_C).abs().sum() <= (prior_C - even).abs().sum()
    return is_nearer | ((home_C - even).abs().sum() <= TOO_CLOSE)


def check_log_prior(log_prior: Tensor, num_classes: int) -> Tensor:
    """The log-prior itself, or an error that says why it is none."""
    if log_prior.shape != (num_classes,):
        raise DataError(
            f"a prior of shape {tuple(log_prior.shape)} is given, but the model knows {num_classes} classes. Give one "
            "log-probability for each."
        )
    total = float(log_prior.double().exp().sum())
    if not abs(total - 1) <= SUM_TOLERANCE:  # so written, a NaN fails it too
        raise DataError(
            f"the prior is no distribution: its probabilities sum to {total:.4g}. Give logs of probabilities that sum "
            "to 1."
        )
    return log_prior
