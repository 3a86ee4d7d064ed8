"""When rounds end before their number is up: validation scores of the clients, and what they say.

Only opted-in validation records count, never a test row: what they decide is part of the training.
"""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

from fedmoe.errors import ConfigError
from fedmoe.evaluation.metric_catalog import ALWAYS_MEASURED, METRICS
from fedmoe.evaluation.metrics import Score

HIGHER_IS_BETTER = {"accuracy": True, "loss": False} | {name: spec.higher_is_better for name, spec in METRICS.items()}

Point = Mapping[str, Any]  # a validation on record: round, clients, and the mean of each metric


def require_targets(targets: Mapping[str, float], measured: Sequence[str]) -> None:
    """A target must be of a metric that is measured, and better in a direction that is known."""
    for name in targets:
        if name not in HIGHER_IS_BETTER or (name in METRICS and METRICS[name].per_class):
            raise ConfigError(
                f"schedule.stop_at has a target for {name!r}, of which it is not known whether more is better. Choose "
                f"from accuracy, loss, {', '.join(one for one in METRICS if not METRICS[one].per_class)}."
            )
        if name in METRICS and name not in (*measured, *ALWAYS_MEASURED):
            raise ConfigError(
                f"schedule.stop_at has a target for {name!r}, which is not measured. Add it to evaluation.metrics."
            )


def validation_point(scores: Sequence[Score]) -> dict[str, Any]:
    """Means over clients, as in the summary of a run: of those for whom it is defined, but for the loss, which is no
    number where a model diverged."""
    columns: dict[str, list[float]] = {}
    for score in scores:
        for name, value in {"accuracy": score.accuracy, "loss": score.loss, **score.metrics}.items():
            columns.setdefault(name, []).append(value)
    defined = {name: values if name == "loss" else _numbers(values) for name, values in columns.items()}
    return {"clients": len(scores), **{name: fmean(values) if values else None for name, values in defined.items()}}


def _numbers(values: Sequence[float]) -> list[float]:
    return [value for value in values if value == value]  # NaN is not equal to itself


def reason_to_stop(points: Sequence[Point], targets: Mapping[str, float] | None, patience: int | None) -> str | None:
    """Why no further round is needed after the last of these validations, or None."""
    if not points:
        return None
    if targets and all(_is_reached(name, points[-1].get(name), target) for name, target in targets.items()):
        reached = " and ".join(f"{name} {points[-1][name]:.4g} reached {target:g}" for name, target in targets.items())
        return f"validation {reached} (schedule.stop_at)"
    best = min(range(len(points)), key=lambda at: _loss(points[at]))
    if patience is not None and len(points) - 1 - best >= patience:
        return (
            f"the validation loss was best after round {points[best]['round']} and no better in {patience} validations "
            "since (schedule.patience)"
        )
    return None


def _is_reached(name: str, value: float | None, target: float) -> bool:
    if value is None:
        return False
    return value >= target if HIGHER_IS_BETTER[name] else value <= target


def _loss(point: Point) -> float:
    """A model that diverged is no better than any."""
    loss: float = point["loss"]
    return loss if loss == loss else inf
