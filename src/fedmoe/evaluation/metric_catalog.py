"""Metrics by name, and the kind of task that each is for. A new one is a function and a line here; reads no tensors."""

from typing import Literal, NamedTuple

from fedmoe.config_errors import nearest
from fedmoe.errors import ConfigError
from fedmoe.import_strings import is_import_string

Task = Literal["classification", "regression"]
_CLASSIFICATION = "fedmoe.evaluation.classification"
_REGRESSION = "fedmoe.evaluation.regression"


class MetricSpec(NamedTuple):
    """`function` is an import string: name(log-probabilities (N, C), labels (N,)) -> a number, NaN where undefined;
    of a regression name(predictions (N, T), targets).

    One that is measured per class is called once for each, with its number as third argument.
    """

    title: str
    task: Task
    function: str
    higher_is_better: bool = True
    per_class: bool = False


METRICS = {
    "log_loss": MetricSpec("Log loss", "classification", f"{_CLASSIFICATION}:log_loss", higher_is_better=False),
    "balanced_accuracy": MetricSpec("Balanced accuracy", "classification", f"{_CLASSIFICATION}:balanced_accuracy"),
    "macro_f1": MetricSpec("Macro-F1", "classification", f"{_CLASSIFICATION}:macro_f1"),
    "auc": MetricSpec("AUC", "classification", f"{_CLASSIFICATION}:auc"),
    "ece": MetricSpec("ECE", "classification", f"{_CLASSIFICATION}:ece", higher_is_better=False),
    "brier": MetricSpec("Brier", "classification", f"{_CLASSIFICATION}:brier", higher_is_better=False),
    "recall": MetricSpec("Recall", "classification", f"{_CLASSIFICATION}:recall", per_class=True),
    "rmse": MetricSpec("RMSE", "regression", f"{_REGRESSION}:rmse", higher_is_better=False),
    "mae": MetricSpec("MAE", "regression", f"{_REGRESSION}:mae", higher_is_better=False),
    "r2": MetricSpec("R²", "regression", f"{_REGRESSION}:r2"),
}
ALWAYS_MEASURED = ("rmse", "mae", "r2")  # in a regression, which has no accuracy


def require_known(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the section [evaluation]: names of the catalog, or import strings."""
    for name in names:
        if name in ("accuracy", "loss", *ALWAYS_MEASURED):
            of_task = " in a regression, and never for classes" if name in ALWAYS_MEASURED else ""
            raise ConfigError(f"evaluation.metrics: {name!r} is always measured{of_task}. Leave it out.")
        if not is_import_string(name) and name not in METRICS:
            raise ConfigError(
                f"evaluation.metrics={name!r} is not known, and no import string such as 'package.module:name'. "
                f"{nearest(name, list(METRICS))}"
            )
    return names


def title_of(name: str) -> str:
    """What tables call a metric; one of the user's own goes by its own name.

    >>> title_of("macro_f1"), title_of("cost")
    ('Macro-F1', 'cost')
    """
    return METRICS[name].title if name in METRICS else name


def of_class(name: str, number: int) -> str:
    """What the score of one class is called, by number: names of classes may hold anything."""
    return f"{name}_{number}"


def class_in(name: str) -> tuple[str, int] | None:
    """
    >>> class_in("recall_12"), class_in("macro_f1")
    (('recall', 12), None)
    """
    metric, _, number = name.rpartition("_")
    return (metric, int(number)) if metric in METRICS and METRICS[metric].per_class and number.isdigit() else None


def is_detail(name: str) -> bool:
    """Metrics of an algorithm's own whose name has a colon are stored, but no column of a table.

    >>> is_detail("expert_accuracy:3"), is_detail("confidence")
    (True, False)
    """
    return ":" in name
