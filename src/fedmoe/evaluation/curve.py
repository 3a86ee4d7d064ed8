"""Where training stands after a round: scores before personalisation, and what they have cost in bytes so far."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe.evaluation.metrics import Score

# Which clients on which data make which mean, as in the summary of a finished run.
MEANS = {
    "own": ("own", False),
    "global": ("global", False),
    "unseen": ("own", True),
    "tuning": ("tuning", True),
    "pooled": ("pooled", True),
}


def curve_point(scores: Sequence[Score], traffic: Mapping[str, int]) -> dict[str, Any]:
    """Bytes so far, and the mean over clients of each kind of score; None where there is nothing to score."""
    point: dict[str, Any] = {"bytes_up": traffic["bytes_up"], "bytes_down": traffic["bytes_down"]}
    for name, (data, unseen) in MEANS.items():
        found = [
            score.metrics.get("rmse", score.accuracy)
            for score in scores
            if score.data == data and score.unseen == unseen
        ]
        point[name] = fmean(found) if found else None
    metrics = mean_metrics(scores)
    return {**point, "metrics": metrics} if metrics else point


def mean_metrics(scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Of the user's and the algorithm's own, by kind of accuracy and name: over clients for whom they are defined."""
    means: dict[str, dict[str, float]] = {}
    for kind, (data, unseen) in MEANS.items():
        some = [score.metrics for score in scores if score.data == data and score.unseen == unseen]
        for name in dict.fromkeys(name for one in some for name in one):
            defined = [one[name] for one in some if math.isfinite(one.get(name, math.nan))]
            if defined:
                means.setdefault(kind, {})[name] = fmean(defined)
    return means
