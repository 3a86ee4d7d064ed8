"""How good a model is on some examples: accuracy and loss, errors of a regression, and metrics of the user's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import import_strings
from fedmoe.core_types import Examples
from fedmoe.errors import ConfigError
from fedmoe.models.task import Regression, Task
from fedmoe.training.inference import CHUNK

Metric = Callable[[Tensor, Tensor], Any]  # (log-probabilities (N, C), labels (N,)), or numbers -> a number
REGRESSION_METRICS = ("rmse", "mae", "r2")


class Score(NamedTuple):
    """Every score names the client, the model and the data that it was measured on."""

    client: int
    unseen: bool  # the client never trained with the others
    model: str  # "before" or "after" personalisation
    data: str  # "own", "global", or "pooled": a sample of all clients' validation examples
    accuracy: float  # NaN in a regression
    loss: float  # mean negative log-likelihood, or the loss of the regression
    examples: int
    metrics: Mapping[str, float] = {}  # of a regression and of the user's own, by name; NaN where one is not defined

    def as_dict(self) -> dict[str, Any]:
        """As results store it: without metrics where there are none, and without an accuracy in a regression."""
        table = {key: value for key, value in self._asdict().items() if key != "metrics" or value}
        if math.isnan(self.accuracy):
            del table["accuracy"]
        return table


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Functions of the user's own by what their scores are called: the name after the colon of the import string."""
    metrics: dict[str, Metric] = {}
    for name in names:
        called = name.rpartition(":")[2]
        if called in REGRESSION_METRICS:
            raise ConfigError(f"evaluation.metrics has {called!r}, which regressions have anyway. Rename the function.")
        if called in metrics:
            raise ConfigError(f"evaluation.metrics has two metrics called {called!r}. Give one of them another name.")
        metrics[called] = import_strings.load("evaluation.metrics", name)
    return metrics


def score_examples(
    predict: Callable[[Tensor], Tensor],
    rows: Examples,
    metrics: Mapping[str, Metric] | None = None,
    task: Task | None = None,
) -> tuple[float, float, int, dict[str, float]]:
    """The last fields of a Score: accuracy, mean loss, how many examples, and the metrics."""
    with torch.no_grad():
        predictions_NC = torch.cat([predict(x) for x in rows.x.split(CHUNK)])
    others = {name: _number(name, metric(predictions_NC, rows.y)) for name, metric in (metrics or {}).items()}
    if isinstance(task, Regression):
        loss = task.losses(predictions_NC, rows.y).double().mean()
        return math.nan, float(loss), len(rows.y), {**regression_metrics(predictions_NC, rows.y), **others}
    correct = (predictions_NC.argmax(1) == rows.y).double().mean()
    likelihood = predictions_NC.gather(1, rows.y[:, None]).double().mean()
    return float(correct), -float(likelihood), len(rows.y), others


def regression_metrics(predictions_NT: Tensor, y_N: Tensor) -> dict[str, float]:
    """RMSE and MAE over all numbers; R², the mean over targets, where every target varies."""
    y_NT = y_N.reshape(predictions_NT.shape).double()
    error_NT = predictions_NT.double() - y_NT
    total_T = (y_NT - y_NT.mean(0)).square().sum(0)
    explained_T = 1 - error_NT.square().sum(0) / total_T
    r2 = explained_T.mean() if bool((total_T > 0).all()) else math.nan
    return {"rmse": float(error_NT.square().mean().sqrt()), "mae": float(error_NT.abs().mean()), "r2": float(r2)}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"evaluation.metrics: {name!r} returned a {type(value).__name__}, not a number. Return a float, or NaN "
            "where the metric is not defined."
        ) from error
