"""Stored results grouped by method: what the figures and the page read from them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord

Row = Mapping[str, Any]  # one method of the summary table, as made by `fedmoe.evaluation.summary`


class Method(NamedTuple):
    """The runs of one method, one per seed; `place` picks its colour, the same in every figure."""

    place: int
    title: str
    runs: tuple[RunRecord, ...]


def group(results: Iterable[RunRecord]) -> list[Method]:
    """In the order in which methods first appear."""
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    for result in results:
        runs[result["title"]].append(result)
    return [Method(place, title, tuple(found)) for place, (title, found) in enumerate(runs.items())]


def own_scores(method: Method) -> list[float]:
    """One per client that took part in training, and seed: after personalisation where there is any, else before."""
    return [score for run in method.runs for _, score in _own_scores(run)]


def weakest_clients(method: Method, most: int = 3) -> list[tuple[str, float]]:
    """Names and mean scores of the clients that the method serves worst; empty where clients have no names.

    Numbered clients of a drawn split are left out: client 3 of one seed is not client 3 of another.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for run in method.runs:
        names = client_names(run)
        for client, score in _own_scores(run):
            if client in names:
                found[names[client]].append(score)
    means = [(name, fmean(values)) for name, values in found.items()]
    return sorted(means, key=lambda pair: pair[1], reverse=not figure_of(method.runs).higher_is_better)[:most]


def client_names(run: RunRecord) -> dict[int, str]:
    """By number; JSON makes the numbers text. Empty where clients have no names."""
    return {int(client): name for client, name in (run.get("client_names") or {}).items()}


def _own_scores(run: RunRecord) -> list[tuple[int, float]]:
    last = "after" if any(score["model"] == "after" for score in run["scores"]) else "before"
    own = (s for s in run["scores"] if s["data"] == "own" and not s["unseen"] and s["model"] == last)
    figure = figure_of([run])
    return [(score["client"], figure.of(score)) for score in own]


def rejected_updates(run: RunRecord) -> int:
    """Results of version 0.1 count them as `refused`."""
    traffic = run.get("traffic") or {}
    return int(run.get("rejected", traffic.get("rejected", traffic.get("refused", 0))))


def training_losses(method: Method) -> dict[int, float]:
    """Round -> training loss, mean over seeds; empty for a method without rounds."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in method.runs:
        for record in run.get("history", ()):
            loss = record["reports"].get("training_loss")
            if loss is not None and math.isfinite(loss):
                found[record["round"]].append(loss)
    return {round_: fmean(losses) for round_, losses in sorted(found.items())}
