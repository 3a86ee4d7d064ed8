"""How good class probabilities are, beside accuracy: one number of a client's rows each, NaN where it is undefined.

Over few rows a class may well be missing, so each says what it does then. Shape suffixes: N examples, C classes.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_BINS = 15  # of equal width, as in Guo et al. 2017


def log_loss(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Mean negative log-likelihood."""
    return -float(log_probs_NC.gather(1, y_N[:, None]).double().mean())


def confusion(log_probs_NC: Tensor, y_N: Tensor) -> Tensor:
    """(C, C) counts: rows are true classes, columns predicted ones."""
    num_classes = log_probs_NC.shape[1]
    cells_N = y_N * num_classes + log_probs_NC.argmax(1)
    return torch.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes).double()


def balanced_accuracy(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Mean recall of the classes that the labels have."""
    counts_CC = confusion(log_probs_NC, y_N)
    true_C = counts_CC.sum(1)
    return float((counts_CC.diagonal() / true_C)[true_C > 0].mean())


def recall(log_probs_NC: Tensor, y_N: Tensor, label: int) -> float:
    """The share of a class's examples that are recognised; undefined where it has none."""
    chosen = y_N == label
    return float((log_probs_NC.argmax(1) == y_N)[chosen].double().mean()) if bool(chosen.any()) else math.nan


def macro_f1(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Mean over the classes that are there or are predicted: 2 TP / (2 TP + FP + FN)."""
    counts_CC = confusion(log_probs_NC, y_N)
    all_C = counts_CC.sum(0) + counts_CC.sum(1)
    return float((2 * counts_CC.diagonal() / all_C)[all_C > 0].mean())


def auc(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Area under the ROC curve, one class against the rest, mean over the classes that the labels have.

    By ranks (Mann-Whitney), ties count half. Undefined with a single class, or where a score is not a number.
    """
    is_class_CN = F.one_hot(y_N, log_probs_NC.shape[1]).T.double()
    positive_C = is_class_CN.sum(1)
    defined_C = (positive_C > 0) & (positive_C < len(y_N))
    if not bool(defined_C.any()) or bool(log_probs_NC.isnan().any()):
        return math.nan
    scores_CN = log_probs_NC.T.contiguous()
    ordered_CN = scores_CN.sort(1).values
    below_CN, up_to_CN = (torch.searchsorted(ordered_CN, scores_CN, right=right) for right in (False, True))
    ranks_CN = (below_CN + up_to_CN + 1).double() / 2
    wins_C = (ranks_CN * is_class_CN).sum(1) - positive_C * (positive_C + 1) / 2
    return float((wins_C / (positive_C * (len(y_N) - positive_C)))[defined_C].mean())


def ece(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Expected calibration error: how far confidence and accuracy are apart, over 15 bins of equal width."""
    confidence_N, predicted_N = log_probs_NC.double().exp().max(1)
    if bool(confidence_N.isnan().any()):
        return math.nan
    bin_N = (confidence_N * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1  # (0, 1/15], …, (14/15, 1]
    gap_N = (predicted_N == y_N).double() - confidence_N
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add(0, bin_N, gap_N)
    return float(gaps.abs().sum() / len(y_N))


def brier(log_probs_NC: Tensor, y_N: Tensor) -> float:
    """Mean squared distance of the probabilities from the truth, summed over classes: 0 is best, 2 is worst."""
    probs_NC = log_probs_NC.double().exp()
    return float(((probs_NC - F.one_hot(y_N, probs_NC.shape[1])) ** 2).sum(1).mean())
