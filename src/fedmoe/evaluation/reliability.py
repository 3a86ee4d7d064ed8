"""How often a model is right when it says how sure it is: the sums behind a reliability diagram.

Shape suffixes: N examples, C classes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

BINS = 10
Bins = tuple[tuple[float, ...], ...]  # examples, summed confidence and right answers, for each bin of confidence
NO_BINS: Bins = ((0.0,) * BINS,) * 3


def reliability_bins(log_probs_NC: Tensor, y_N: Tensor) -> Bins:
    """By the probability of the predicted label, from 0 to 1 in bins of equal width."""
    confidence_N, predicted_N = log_probs_NC.double().exp().max(1)
    bin_N = (confidence_N * BINS).long().clamp(0, BINS - 1)
    sums = (torch.ones_like(confidence_N), confidence_N, (predicted_N == y_N).double())
    return tuple(tuple(torch.zeros(BINS, dtype=torch.float64).scatter_add(0, bin_N, s).tolist()) for s in sums)


def summed(bins: Iterable[Bins]) -> Bins:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*bins, strict=True))


def reliability_of(scores: Iterable[Any]) -> list[dict[str, Any]]:
    """What results store of clients that took part: sums over them, of each answer, model and data."""
    found: dict[tuple[str, str, str], list[Bins]] = {}
    for score in scores:
        if any(score.reliability[0]) and not score.unseen:
            found.setdefault((score.answer, score.model, score.data), []).append(score.reliability)
    return [
        {"answer": answer, "model": model, "data": data, "bins": [list(row) for row in summed(bins)]}
        for (answer, model, data), bins in found.items()
    ]
