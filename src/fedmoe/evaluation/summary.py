"""Scores of many clients and seeds in a few honest numbers. Reads saved results, needs no tensors.

One seed gives no interval; the interval over seeds is Student's t, since seeds are few.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedmoe.evaluation.answers import RunRecord as RunRecord
from fedmoe.evaluation.answers import by_answer
from fedmoe.evaluation.figure_of_merit import FigureOfMerit, figure_of
from fedmoe.evaluation.metric_catalog import class_in, is_detail

Row = dict[str, Any]


def summarise(results: Sequence[RunRecord]) -> list[Row]:
    """One row per method, then per further answer of one: own, global, unseen and pooled scores; metrics."""
    methods: dict[str, list[RunRecord]] = {}
    figure = figure_of(results)
    for result in by_answer(results):
        methods.setdefault(result["title"], []).append(result)
    return [
        {
            "title": title,
            "algorithm": runs[0]["algorithm"],
            "seeds": len(runs),
            "own": _cell(runs, figure, data="own", unseen=False),
            "global": _cell(runs, figure, data="global", unseen=False),
            "global_validation": _cell(runs, figure, data="global_validation", unseen=False),
            "unseen": _cell(runs, figure, data="own", unseen=True),
            "tuning": _cell(runs, figure, data="tuning", unseen=True),
            "pooled": _cell(runs, figure, data="pooled", unseen=True),
            "metrics": {name: _metric(runs, name) for name in _metric_names(runs) if _is_beside(figure, name)},
            "by_class": _by_class(runs),
        }
        for title, runs in methods.items()
    ]


def _cell(runs: Sequence[RunRecord], figure: FigureOfMerit, *, data: str, unseen: bool) -> Row | None:
    finals = [_values(run, figure, data, unseen, final_model(run)) for run in runs]
    if not all(len(values) for values in finals):
        return None
    firsts = [_values(run, figure, data, unseen, "before") for run in runs if final_model(run) == "after"]
    befores = [values.mean() for values in firsts if len(values)]
    means = [float(values.mean()) for values in finals]
    return {
        "mean": float(np.mean(means)),
        "interval": interval(means),
        "spread": float(np.mean([values.std() for values in finals])),
        "worst_decile": float(np.mean([figure.worst_decile(values) for values in finals])),
        "before": float(np.mean(befores)) if befores else None,
    }


def _metric_names(runs: Sequence[RunRecord]) -> list[str]:
    found = {name: None for run in runs for score in run["scores"] for name in score.get("metrics", {})}
    return [name for name in found if not is_detail(name)]


def _is_beside(figure: FigureOfMerit, name: str) -> bool:
    return name != figure.key and not class_in(name)


def _metric(runs: Sequence[RunRecord], name: str) -> Row | None:
    """On own data, of final models, where it is defined."""
    found = [_own_metric(run, name) for run in runs]
    means = [float(values.mean()) for values in found if len(values)]
    return {"mean": float(np.mean(means)), "interval": interval(means)} if means else None


def _by_class(runs: Sequence[RunRecord]) -> dict[str, list[Row | None]]:
    """Metrics that are measured per class: by name, one cell for each class."""
    found: dict[str, list[Row | None]] = {}
    for name in _metric_names(runs):
        if of := class_in(name):
            found.setdefault(of[0], []).append(_metric(runs, name))
    return found


def _own_metric(run: RunRecord, name: str) -> np.ndarray:
    model = final_model(run)
    chosen = (s for s in run["scores"] if s["data"] == "own" and not s["unseen"] and s["model"] == model)
    values = np.array([score.get("metrics", {}).get(name, math.nan) for score in chosen], dtype=float)
    defined: np.ndarray = values[np.isfinite(values)]
    return defined


def interval(means: Sequence[float]) -> float | None:
    """Half the 95% interval of the mean over seeds.

    >>> interval([0.5]) is None
    True
    >>> round(interval([0.4, 0.6]), 3)
    1.271
    """
    if len(means) < 2:
        return None
    from scipy.stats import t as student_t  # here, because its import takes a second

    return float(student_t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / math.sqrt(len(means)))


def final_model(run: RunRecord) -> str:
    return "after" if any(score["model"] == "after" for score in run["scores"]) else "before"


def _values(run: RunRecord, figure: FigureOfMerit, data: str, unseen: bool, model: str) -> np.ndarray:
    chosen = (s for s in run["scores"] if s["data"] == data and s["unseen"] == unseen and s["model"] == model)
    return np.array([figure.of(score) for score in chosen], dtype=float)
