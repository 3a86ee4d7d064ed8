"""How good a model is on some examples: accuracy, loss, and the metrics that a config names."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import import_strings
from fedmoe.core_types import Examples
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metric_catalog import ALWAYS_MEASURED, METRICS, of_class
from fedmoe.evaluation.metric_catalog import Task as TaskName
from fedmoe.evaluation.reliability import NO_BINS, Bins, reliability_bins
from fedmoe.models.task import CLASSIFICATION, Regression, Task
from fedmoe.training.inference import CHUNK

Metric = Callable[[Tensor, Tensor], Any]  # (log-probabilities (N, C), labels (N,)) or (numbers, targets) -> a number


class Score(NamedTuple):
    """Every score names the client, the model and the data that it was measured on."""

    client: int
    unseen: bool  # the client never trained with the others
    model: str  # "before" or "after" personalisation
    # "own"; "tuning": the same of an unseen client by which settings are chosen; "global", "global_validation";
    # "pooled": a sample of all clients' validation examples; or "validation" on the way.
    data: str
    accuracy: float  # NaN in a regression
    loss: float  # mean negative log-likelihood, or the loss of the regression
    examples: int
    metrics: Mapping[str, float] = {}  # those that the config names; NaN where one is not defined
    answer: str = ""  # which of the algorithm's answers, where it has several
    chosen: bool = False  # the candidate that the client chose
    reliability: Bins = NO_BINS  # results store the sums over clients

    def as_dict(self) -> dict[str, Any]:
        """As results store it: without what is empty for most, and without an accuracy in a regression."""
        table = {key: value for key, value in self._asdict().items() if key not in _MAY_BE_EMPTY or value}
        del table["reliability"]
        if math.isnan(self.accuracy):
            del table["accuracy"]
        return table

    @property
    def place(self) -> tuple[int, bool, str, str, str]:
        """What no two scores of a run share: their order."""
        return self.client, self.unseen, self.model, self.data, self.answer


_MAY_BE_EMPTY = ("metrics", "answer", "chosen")


class Measured(NamedTuple):
    """What is measured on some examples: fields of a Score."""

    accuracy: float
    loss: float
    examples: int
    metrics: dict[str, float]
    reliability: Bins


def load_metrics(names: Sequence[str], num_classes: int, task: TaskName = "classification") -> dict[str, Metric]:
    """Functions by what their scores are called: a name of the catalog, or what follows an import string's colon.

    One that is measured per class is there once for each; a regression's own come first.
    """
    metrics: dict[str, Metric] = {}
    names = (*ALWAYS_MEASURED, *names) if task == "regression" else names
    for name in names:
        called, spec = name.rpartition(":")[2], METRICS.get(name)
        if called in metrics or name in names[: names.index(name)]:
            raise ConfigError(f"evaluation.metrics has two metrics called {called!r}. Give one of them another name.")
        function = import_strings.load("evaluation.metrics", spec.function if spec else name)
        if spec and spec.task != task:
            raise ConfigError(f"evaluation.metrics={name!r} is for {spec.task}, and these data are a {task}.")
        if spec and spec.per_class:
            metrics |= {of_class(name, label): partial(_of_one_class, function, label) for label in range(num_classes)}
        else:
            metrics[called] = function
    return metrics


def _of_one_class(function: Callable[[Tensor, Tensor, int], float], label: int, log_probs: Tensor, y: Tensor) -> float:
    return function(log_probs, y, label)


def score_examples(
    predict: Callable[[Tensor], Tensor],
    rows: Examples,
    metrics: Mapping[str, Metric] | None = None,
    task: Task = CLASSIFICATION,
    batch_size: int | None = None,
) -> Measured:
    """Rows are answered so many together where their answers depend on one another, else as many as are fast."""
    with torch.no_grad():
        predictions_NC = torch.cat([predict(x) for x in rows.x.split(batch_size or CHUNK)])
    loss = float(task.losses(predictions_NC, rows.y).double().mean())
    others = {name: _number(name, metric(predictions_NC, rows.y)) for name, metric in (metrics or {}).items()}
    if isinstance(task, Regression):
        return Measured(math.nan, loss, len(rows.y), others, NO_BINS)
    correct = float((predictions_NC.argmax(1) == rows.y).double().mean())
    return Measured(correct, loss, len(rows.y), others, reliability_bins(predictions_NC, rows.y))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"evaluation.metrics: {name!r} returned a {type(value).__name__}, not a number. Return a float, or NaN "
            "where the metric is not defined."
        ) from error
