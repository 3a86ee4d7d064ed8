"""Scores are a message like any other: declared, checked, and counted in a section of their own."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import ClientId, Tensors
from fedmoe.errors import MessageError
from fedmoe.evaluation.metric_catalog import is_detail
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.reliability import BINS, NO_BINS, Bins
from fedmoe.wire import message

MODELS = ("before", "after")
VALIDATION = "validation"
DATA = ("own", "global", "pooled", VALIDATION, "tuning", "global_validation")
MAX_LOSS = 1e9  # of what is a number at all


@message
class ScoreMessage(NamedTuple):
    """One client's scores, one after another (M,)."""

    model: Tensor  # which of MODELS
    data: Tensor  # which of DATA
    accuracy: Tensor
    loss: Tensor
    examples: Tensor
    answer: Tensor  # which of the algorithm's answers, in the order of their names
    chosen: Tensor  # 1 for the candidate that the client chose
    reliability: Tensor  # (M, 3, bins): see `evaluation.reliability`
    metrics: Tensors  # those that the config names


def score_message(scores: Sequence[Score], answers: Sequence[str] = ("",)) -> ScoreMessage:
    def whole(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def real(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    names = scores[0].metrics if scores else {}
    return ScoreMessage(
        model=whole([MODELS.index(score.model) for score in scores]),
        data=whole([DATA.index(score.data) for score in scores]),
        accuracy=real([score.accuracy for score in scores]),
        loss=real([score.loss for score in scores]),
        examples=whole([score.examples for score in scores]),
        answer=whole([answers.index(score.answer) for score in scores]),
        chosen=whole([int(score.chosen) for score in scores]),
        reliability=torch.tensor([score.reliability for score in scores], dtype=torch.float64).reshape(
            -1, len(NO_BINS), BINS
        ),
        metrics={name: real([score.metrics[name] for score in scores]) for name in names},
    )


def scores_in(
    sent: ScoreMessage,
    client: ClientId,
    *,
    unseen: bool,
    metrics: Collection[str] = (),
    answers: Sequence[str] = ("",),
) -> list[Score]:
    """The scores that a client sent, with metrics and answers of these names.

    A diverged model's loss and a metric that is not defined may be no number; everything else must be in range.
    """
    _check(sent, len(answers), is_regression="rmse" in metrics)
    if sent.model.numel() and sent.metrics.keys() != set(metrics):
        raise MessageError(f"it has metrics {sorted(sent.metrics)}, not {sorted(metrics)}")
    others = [_defined({name: sent.metrics[name][row].item() for name in metrics}) for row in range(len(sent.model))]
    columns = zip(*(column.tolist() for column in sent[:-1]), others, strict=True)
    return [
        Score(client, unseen, MODELS[m], DATA[d], accuracy, loss, count, own, answers[a], bool(chosen), _bins(sums))
        for m, d, accuracy, loss, count, a, chosen, sums, own in columns
    ]


def _defined(metrics: dict[str, float]) -> dict[str, float]:
    """Details that are not defined are left out: of the experts that a client does not hold there is nothing to say."""
    return {name: value for name, value in metrics.items() if not (is_detail(name) and math.isnan(value))}


def _bins(sums: list[list[float]]) -> Bins:
    return tuple(map(tuple, sums))


def _check(sent: ScoreMessage, num_answers: int, *, is_regression: bool) -> None:
    kinds = dict.fromkeys(("model", "data", "examples", "answer", "chosen"), torch.int64)
    columns = {**sent._asdict(), **{f"metrics/{name}": column for name, column in sent.metrics.items()}}
    del columns["metrics"]
    bins = columns.pop("reliability")
    if bins.dtype != torch.float64 or bins.shape != (len(sent.model), len(NO_BINS), BINS):
        raise MessageError(f"reliability is {bins.dtype} {tuple(bins.shape)}, not three rows of bins for each score")
    for name, column in columns.items():
        if column.dtype != kinds.get(name, torch.float64) or column.dim() != 1 or len(column) != len(sent.model):
            raise MessageError(f"{name} is {column.dtype} {tuple(column.shape)}, not a column of the scores")
    if bool((sent.loss.abs() > MAX_LOSS).logical_and(sent.loss.isfinite()).any()):
        raise MessageError(f"a loss is beyond {MAX_LOSS:g}, which no mean would survive")
    for name, column in sent.metrics.items():
        if bool((column.abs() > MAX_LOSS).any()):
            raise MessageError(f"the metric {name!r} is beyond {MAX_LOSS:g}, which no mean would survive")
    ranges = {
        "model": (0, len(MODELS) - 1),
        "data": (0, len(DATA) - 1),
        "answer": (0, num_answers - 1),
        "chosen": (0, 1),
        "accuracy": (0, 1),
        "examples": (1, 2**53),
    }
    if is_regression:
        del ranges["accuracy"]
        if not bool(sent.accuracy.isnan().all()):
            raise MessageError("it has an accuracy, but this is a regression")
    for name, (low, high) in ranges.items():
        column = getattr(sent, name)
        if not bool(((column >= low) & (column <= high)).all()):
            raise MessageError(f"{name} is not within {low} … {high}")
    if not bool(((bins >= 0) & (bins <= sent.examples[:, None, None])).all()):
        raise MessageError("a bin of confidence holds no number of the examples")
    places = zip(sent.model.tolist(), sent.data.tolist(), sent.answer.tolist(), strict=True)
    if len({*places}) != len(sent.model):
        raise MessageError("a score is there more than once")
