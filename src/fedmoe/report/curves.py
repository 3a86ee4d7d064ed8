"""Learning curves: scores before personalisation against rounds, and against what was sent so far."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report import svg
from fedmoe.report.figures import curve
from fedmoe.report.methods import Method, group
from fedmoe.report.svg import Frame, Scale

GIGABYTE = 1e9
KINDS = {
    "own": "clients' own test data",
    "unseen": "unseen clients' data",
    "pooled": "the pooled data, for a new client",
}
AXES = {"round": "Round", "bytes": "GB sent, up and down →"}

Point = tuple[float, float]


def learning_curve(results: Sequence[RunRecord], kind: str, against: str) -> str:
    """One line per method, mean over seeds; empty where no run was evaluated between rounds."""
    lines = [(method, points) for method in group(results) if (points := curve_of(method, kind, against))]
    if not lines:
        return ""
    frame = Frame(68, 20.0 + 22 * len(lines), svg.WIDTH - 16, 300.0 + 22 * len(lines))
    across, up = zip(*(point for _, points in lines for point in points), strict=True)
    x = Scale(0, max(across), frame.left, frame.right)
    figure = figure_of(results)
    y = Scale(*svg.domain(up, 0.04, figure.limits), frame.bottom, frame.top)
    return svg.document(
        f"curve-{kind}-{against}",
        f"{figure.name} on {KINDS[kind]} over {'rounds' if against == 'round' else 'bytes sent'}",
        "; ".join(f"{method.title}: {figure.with_unit(points[-1][1])} in the end" for method, points in lines),
        frame.bottom + 52,
        svg.x_axis(x, frame, AXES[against], whole=against == "round"),
        svg.y_axis(y, frame, f"{figure.name} on {KINDS[kind]}", percent=figure.percent),
        *(curve(i, points, method, method.title, x, y) for i, (method, points) in enumerate(lines)),
    )


def curve_of(method: Method, kind: str, against: str) -> list[Point]:
    """Means over the seeds, at the rounds in which all of them were evaluated."""
    runs = [{point["round"]: point for point in run.get("curve", ())} for run in method.runs]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    shown = [[run[number] for run in runs] for number in rounds]
    return [
        (fmean(_across(point, against) for point in points), fmean(point[kind] for point in points))
        for points in shown
        if all(point[kind] is not None for point in points)
    ]


def _across(point: Mapping[str, float], against: str) -> float:
    return point["round"] if against == "round" else (point["bytes_up"] + point["bytes_down"]) / GIGABYTE
