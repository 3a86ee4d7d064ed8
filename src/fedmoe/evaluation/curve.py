"""Where training stands after a round: scores before personalisation, and what they have cost in bytes so far."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe.evaluation.metrics import Score

# Which clients on which data make which mean, as in the summary of a finished run.
MEANS = {"own": ("own", False), "global": ("global", False), "unseen": ("own", True), "pooled": ("pooled", True)}


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
    return point
