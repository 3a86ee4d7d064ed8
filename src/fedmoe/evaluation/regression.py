"""Metrics of a regression: (predictions (N, T), targets (N,) or (N, T)) -> a number."""

import math

from torch import Tensor


def rmse(predictions_NT: Tensor, y_N: Tensor) -> float:
    """Over all rows and targets together."""
    return float(_errors(predictions_NT, y_N).square().mean().sqrt())


def mae(predictions_NT: Tensor, y_N: Tensor) -> float:
    return float(_errors(predictions_NT, y_N).abs().mean())


def r2(predictions_NT: Tensor, y_N: Tensor) -> float:
    """The share of the variance that is explained, a mean over targets; NaN where one of them does not vary."""
    y_NT = y_N.reshape(predictions_NT.shape).double()
    total_T = (y_NT - y_NT.mean(0)).square().sum(0)
    if not bool((total_T > 0).all()):
        return math.nan
    return float((1 - _errors(predictions_NT, y_N).square().sum(0) / total_T).mean())


def _errors(predictions_NT: Tensor, y_N: Tensor) -> Tensor:
    return predictions_NT.double() - y_N.reshape(predictions_NT.shape).double()
