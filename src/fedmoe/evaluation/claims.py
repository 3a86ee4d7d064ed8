"""Whether a claim about two methods holds, by the seeds that both ran: pairs of the same split and the same start.

Fewer than four seeds decide nothing: an interval from two or three says more about the seeds than about the methods.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from fedmoe.evaluation.answers import RunRecord, by_answer
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import final_model, interval

LEAST_SEEDS = 4
PARTS = {
    "own": ("own", False), "global": ("global", False), "unseen": ("own", True),
    "global_validation": ("global_validation", False), "tuning": ("tuning", True),
    "pooled": ("pooled", True),
}  # fmt: skip

Part = Literal["own", "global", "global_validation", "unseen", "tuning", "pooled"]
Model = Literal["final", "before"]  # what clients end with, or the state before they personalise
Verdict = Literal["holds", "does not hold", "undecided"]


class Difference(NamedTuple):
    """Of two methods, in points of accuracy or units of error, better is positive; `half` of its 95% interval."""

    seeds: int
    mean: float | None
    half: float | None


def mean_over_clients(run: RunRecord, part: Part, model: Model = "final", metric: str | None = None) -> float | None:
    """Of the figure of merit, or of a metric that an algorithm measures; None where there is nothing to average."""
    data, unseen = PARTS[part]
    wanted = final_model(run) if model == "final" else "before"
    merit = figure_of([run], metric)
    found = [
        merit.of(score)
        for score in run["scores"]
        if (score["data"], score["unseen"], score["model"]) == (data, unseen, wanted)
        and (metric is None or metric in score.get("metrics", ()))
    ]
    return fmean(found) if found else None


def by_seed(
    results: Sequence[RunRecord], title: str, part: Part, model: Model = "final", metric: str | None = None
) -> dict[int, float]:
    """Means over clients of one method, by seed."""
    runs = [run for run in by_answer(results) if run["title"] == title]
    means = {run["seed"]: mean_over_clients(run, part, model, metric) for run in runs}
    return {seed: mean for seed, mean in means.items() if mean is not None}


def paired_difference(
    results: Sequence[RunRecord], method: str, than: str, part: Part, model: Model = "final", metric: str | None = None
) -> Difference:
    one, other = (by_seed(results, title, part, model, metric) for title in (method, than))
    sign = 1 if figure_of(results, metric).higher_is_better else -1
    ahead = [sign * (one[seed] - other[seed]) for seed in sorted(one) if seed in other]
    return Difference(len(ahead), fmean(ahead) if ahead else None, interval(ahead))


def decide(found: Difference, margin: float | None = None) -> Verdict:
    """Ahead: the whole interval lies above zero. With a margin, on par: the whole interval lies within it.

    >>> decide(Difference(4, 0.02, 0.01)), decide(Difference(4, -0.02, 0.01)), decide(Difference(3, 0.02, 0.01))
    ('holds', 'does not hold', 'undecided')
    >>> decide(Difference(4, -0.002, 0.001), margin=0.01), decide(Difference(4, -0.05, 0.01), margin=0.01)
    ('holds', 'does not hold')
    """
    if found.seeds < LEAST_SEEDS or found.mean is None or found.half is None:
        return "undecided"
    low, high = found.mean - found.half, found.mean + found.half
    least, most = (0.0, float("inf")) if margin is None else (-margin, margin)
    if low > least and high < most:
        return "holds"
    return "does not hold" if high < least or low > most else "undecided"
