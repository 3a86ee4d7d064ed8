"""Stored results grouped by method: what tables and figures read from them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedmoe.evaluation.answers import RunRecord, by_answer, with_headline
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import final_model

Row = Mapping[str, Any]  # one method of the summary table, as made by `fedmoe.evaluation.summary`
T = TypeVar("T")

MOST_POINTS = 400


class Method(NamedTuple):
    """The runs of one method, one per seed; `place` picks its colour, the same in every figure."""

    place: int
    title: str
    runs: tuple[RunRecord, ...]


class ClientScores(NamedTuple):
    """What one client ends with: its score on its own and on everyone's data, and on its own before personalising."""

    own: float | None = None
    everyone: float | None = None
    before: float | None = None


def group(results: Iterable[RunRecord], *, every_answer: bool = False) -> list[Method]:
    """In the order in which methods first appear, with the scores of their headlines; or each answer as a method."""
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    for result in by_answer(results) if every_answer else map(with_headline, results):
        runs[result["title"]].append(result)
    return [Method(place, title, tuple(found)) for place, (title, found) in enumerate(runs.items())]


def client_scores(run: RunRecord) -> dict[int, ClientScores]:
    """By client that took part in training: after personalisation where there is any, else before."""
    last, merit = final_model(run), figure_of([run])
    found: dict[int, ClientScores] = defaultdict(ClientScores)
    for score in run["scores"]:
        client, value = score["client"], merit.of(score)
        if score["unseen"]:
            continue
        if score["model"] == "before" and last == "after":
            if score["data"] == "own":
                found[client] = found[client]._replace(before=value)
        elif score["data"] in ("own", "global"):
            field = {"own": "own", "global": "everyone"}[score["data"]]
            found[client] = found[client]._replace(**{field: value})
    return dict(sorted(found.items()))


def final_losses(run: RunRecord, data: str) -> list[float]:
    """Mean negative log-likelihood of each client that took part in training, where it was measured."""
    last = final_model(run)
    chosen = (s for s in run["scores"] if s["data"] == data and s["model"] == last and not s["unseen"])
    return [score["loss"] for score in chosen if score.get("loss") is not None]


def weakest_clients(method: Method, most: int = 3) -> list[tuple[str, float]]:
    """Names and mean scores of the clients that the method serves worst; empty where clients have no names.

    Numbered clients of a drawn split are left out: client 3 of one seed is not client 3 of another.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for run in method.runs:
        names = client_names(run)
        for client, scores in client_scores(run).items():
            if client in names and scores.own is not None:
                found[names[client]].append(scores.own)
    means = [(name, fmean(values)) for name, values in found.items()]
    return sorted(means, key=lambda pair: pair[1], reverse=not figure_of(method.runs).higher_is_better)[:most]


def client_names(run: RunRecord) -> dict[int, str]:
    """By number; JSON makes the numbers text. Empty where clients have no names."""
    return {int(client): name for client, name in (run.get("client_names") or {}).items()}


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


def thin(points: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most `most` of the points, evenly chosen, the first and the last among them.

    >>> thin("abcdefg", 3)
    ['a', 'd', 'g']
    """
    chosen = np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int)
    return [points[i] for i in chosen]
