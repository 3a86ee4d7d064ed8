"""Stored results grouped by method: what the figures and the page read from them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

Result = dict[str, Any]  # one run, as stored in results.json
Row = Mapping[str, Any]  # one method of the summary table, as made by `fedmoe.evaluation.summary`


class Method(NamedTuple):
    """The runs of one method, one per seed; `place` picks its colour, the same in every figure."""

    place: int
    title: str
    runs: tuple[Result, ...]


def group(results: Iterable[Result]) -> list[Method]:
    """In the order in which methods first appear."""
    runs: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        runs[result["title"]].append(result)
    return [Method(place, title, tuple(found)) for place, (title, found) in enumerate(runs.items())]


def own_accuracies(method: Method) -> list[float]:
    """One per client that took part in training, and seed: after personalisation where there is any, else before."""
    found = []
    for run in method.runs:
        last = "after" if any(score["model"] == "after" for score in run["scores"]) else "before"
        own = (s for s in run["scores"] if s["data"] == "own" and not s["unseen"] and s["model"] == last)
        found += [float(score["accuracy"]) for score in own]
    return found


def training_losses(method: Method) -> dict[int, float]:
    """Round -> training loss, mean over seeds; empty for a method without rounds."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in method.runs:
        for record in run.get("history", ()):
            loss = record["reports"].get("training_loss")
            if loss is not None and math.isfinite(loss):
                found[record["round"]].append(loss)
    return {round_: fmean(losses) for round_, losses in sorted(found.items())}
