"""The one number by which tables and figures compare methods: accuracy, or the error of a regression. No tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Score = Mapping[str, Any]  # one score, as stored in results.json


class FigureOfMerit(NamedTuple):
    key: str
    name: str  # at the start of a sentence
    higher_is_better: bool
    percent: bool

    @property
    def heading(self) -> str:
        return f"{self.name.lower()} in %" if self.percent else self.name

    @property
    def limits(self) -> tuple[float, float]:
        """Between which it can be."""
        return (0.0, 1.0) if self.percent else (0.0, float("inf"))

    def of(self, score: Score) -> float:
        return float(score["accuracy"] if self.key == "accuracy" else score["metrics"][self.key])

    def text(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.percent else f"{value:.4g}"

    def with_unit(self, value: float) -> str:
        return f"{value:.1%}" if self.percent else self.text(value)

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def worst_decile(self, values: np.ndarray) -> float:
        """Mean over the worst tenth of the clients, at least one."""
        ordered = np.sort(values) if self.higher_is_better else -np.sort(-values)
        return float(ordered[: max(1, len(values) // 10)].mean())


ACCURACY = FigureOfMerit("accuracy", "Accuracy", higher_is_better=True, percent=True)
RMSE = FigureOfMerit("rmse", "RMSE", higher_is_better=False, percent=False)

# What else a table may compare by: shares that an algorithm measures itself.
MEASURED = {"right_choice": FigureOfMerit("right_choice", "Right choices", higher_is_better=True, percent=True)}


def figure_of(results: Sequence[Mapping[str, Any]], metric: str | None = None) -> FigureOfMerit:
    """Runs that share a table saw the same data, so they have the same task; `metric` is a name of MEASURED."""
    if metric is not None:
        return MEASURED[metric]
    return RMSE if any(run.get("task") == "regression" for run in results) else ACCURACY
