"""A temperature and a bias for each class, fitted by all clients together on validation data, after the rounds.

Bias-corrected temperature scaling (Alexandari et al. 2020) of scores s to exp(u) s + b, by the cross-entropy under each
client's own label frequencies, with a ridge on u and b. What clients send is the mean over their opted-in validation
rows of the gradient, each row's clipped to a norm, and how many rows there are: no count of a class, no frequency and
no second derivative. Under a client's own frequencies the gradient by b is what is left of its labels when what the
model expects of them is taken away. Steps are Nesterov's, of a fixed number and length.
Where labels never meet on any client, nothing tells how far apart their biases are: the ridge decides.
Shape suffixes: S clients of a cohort, N examples, C classes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.core_types import ClientId, Examples
from fedmoe.setting_types import PositiveFloat, PositiveInt
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CalibrationConfig:
    exchanges: PositiveInt = 60
    ridge: PositiveFloat = 1e-3  # of u and b, beside the mean cross-entropy of a row
    clip: PositiveFloat = 4.0  # of the norm of a row's gradient


class Calibration(NamedTuple):
    log_scale: Tensor  # u: minus the log of the temperature
    biases: Tensor  # b, (C,)


class Fit(NamedTuple):
    """Where the server stands: the calibration, and that of the step before, which gives the steps their momentum."""

    at: Calibration
    before: Calibration


@message
class Slope(NamedTuple):
    """The mean of the clipped gradients of a client's rows, and how many rows there are. No rows, no vote."""

    log_scale: Tensor
    biases: Tensor
    num_examples: Tensor


STEP = 2.0  # stable below 2.7, since the curvature by b is 1/2 at most
SCALE_STEP = 0.5  # by u: the curvature is the variance of the scores under the prediction, some units at most
MOMENTUM = 0.9
LARGEST_LOG_SCALE = 4.0  # a model whose scores say nothing has no best temperature


def identity(num_classes: int) -> Calibration:
    return Calibration(torch.zeros(()), torch.zeros(num_classes))


def start(num_classes: int) -> Fit:
    return Fit(identity(num_classes), identity(num_classes))


def calibrated(scores: Tensor, calibration: Calibration) -> Tensor:
    """exp(u) s + b of one client's scores (..., C)."""
    return calibration.log_scale.exp() * scores + calibration.biases


def row_gradients(scores_SNC: Tensor, offset_SC: Tensor, y_SN: Tensor, at_S: Calibration, clip: float) -> Calibration:
    """Of each row's cross-entropy by u (S, N) and b (S, N, C), clipped to a norm together."""
    scaled_SNC = at_S.log_scale.exp()[:, None, None] * scores_SNC
    expected_SNC = F.softmax(scaled_SNC + at_S.biases[:, None] + offset_SC[:, None], dim=-1)
    by_biases_SNC = expected_SNC - F.one_hot(y_SN, scores_SNC.shape[-1])
    by_scale_SN = (by_biases_SNC * scaled_SNC).sum(-1)
    norm_SN = (by_biases_SNC.square().sum(-1) + by_scale_SN.square()).sqrt()
    shrink_SN = (clip / norm_SN.clamp_min(torch.finfo(norm_SN.dtype).tiny)).clamp(max=1)
    return Calibration(by_scale_SN * shrink_SN, by_biases_SNC * shrink_SN[..., None])


def slopes(scores_SNC: Tensor, offset_SC: Tensor, examples: Examples, at_S: Calibration, clip: float) -> Slope:
    """What the clients of a cohort send. Padding counts nothing."""
    rows = row_gradients(scores_SNC, offset_SC, examples.y, at_S, clip)
    real_SN = (torch.arange(examples.y.shape[1]) < examples.counts[:, None]).to(scores_SNC.dtype)
    counts_S = examples.counts.to(torch.float32)
    many_S = counts_S.clamp(min=1)
    by_scale_S = (rows.log_scale * real_SN).sum(1) / many_S
    return Slope(by_scale_S, (rows.biases * real_SN[..., None]).sum(1) / many_S[:, None], counts_S)


def rejection(slope: Slope, clip: float) -> str | None:
    """A mean of clipped rows is no longer than one of them."""
    norm = float((slope.biases.square().sum() + slope.log_scale.square()).sqrt())
    return f"its slope has norm {norm:.4g}, above the clip of {clip:g}" if norm > clip * 1.001 else None


def looking_ahead(fit: Fit) -> Calibration:
    """Where the next gradient is asked for."""
    return Calibration(*(at + MOMENTUM * (at - before) for at, before in zip(fit.at, fit.before, strict=True)))


def step(fit: Fit, sent: Mapping[ClientId, Slope], ridge: float, max_weight: float | None = None) -> Fit:
    """Nesterov's step along the mean over all rows, each client's number of them capped by `max_weight`."""
    slopes_of = [slope for _, slope in sorted(sent.items()) if slope.num_examples > 0]
    if not slopes_of:
        return fit
    cap = math.inf if max_weight is None else max_weight
    weights = torch.stack([slope.num_examples for slope in slopes_of]).clamp(max=cap)
    shares = weights / weights.sum()
    ahead = looking_ahead(fit)
    by_scale = sum(share * slope.log_scale for share, slope in zip(shares, slopes_of, strict=True))
    by_biases = sum(share * slope.biases for share, slope in zip(shares, slopes_of, strict=True))
    log_scale = ahead.log_scale - SCALE_STEP * (by_scale + ridge * ahead.log_scale)
    biases = ahead.biases - STEP * (by_biases + ridge * ahead.biases)
    return Fit(Calibration(log_scale.clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE), biases), fit.at)


def fit_alone(scores_NC: Tensor, offset_C: Tensor, y_N: Tensor, config: CalibrationConfig) -> Calibration:
    """The same fit by one client for itself: of a model that nobody else has."""
    rows = Examples(scores_NC[None], y_N[None], torch.tensor([len(y_N)]), {})
    fit = start(scores_NC.shape[-1])
    for _ in range(config.exchanges):
        ahead_S = Calibration(*(part[None] for part in looking_ahead(fit)))
        sent = slopes(scores_NC[None], offset_C[None], rows, ahead_S, config.clip)
        fit = step(fit, {0: Slope(*(part[0] for part in sent))}, config.ridge)
    return fit.at
