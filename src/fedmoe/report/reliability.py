"""The reliability diagram: how often answers are right, by how sure they are."""

from collections.abc import Sequence
from typing import Any

from fedmoe.evaluation.summary import RunRecord
from fedmoe.report import svg
from fedmoe.report.methods import Method, group
from fedmoe.report.svg import Frame, Scale, element, line, number, text


def reliability_diagram(results: Sequence[RunRecord], data: str = "own") -> str:
    """Accuracy against confidence on the clients' data, a line for each method; on the diagonal they agree."""
    drawn = [(method, points) for method in group(results) if (points := _points(method, data))]
    if not drawn:
        return ""
    frame = Frame(68, 20.0 + 22 * len(drawn), svg.WIDTH - 16, 360.0 + 22 * len(drawn))
    x, y = Scale(0, 1, frame.left, frame.right), Scale(0, 1, frame.bottom, frame.top)
    return svg.document(
        f"reliability-{data}",
        "Accuracy against confidence",
        "; ".join(f"{m.title}: {', '.join(f'{a:.2f} at {c:.2f}' for c, a in points)}" for m, points in drawn),
        frame.bottom + 52,
        svg.x_axis(x, frame, "Probability of the predicted label", percent=True),
        svg.y_axis(y, frame, "Accuracy", percent=True),
        line(x(0), y(0), x(1), y(1), class_="lead", stroke_dasharray="1 3"),
        *(_line(i, method, points, x, y) for i, (method, points) in enumerate(drawn)),
    )


def _points(method: Method, data: str) -> list[tuple[float, float]]:
    """(mean confidence, accuracy) of each bin that holds an example, over all clients and seeds."""
    found = [bins for run in method.runs if (bins := _bins(run, data))]
    sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
    if not sums:
        return []
    return [(sure / count, right / count) for count, sure, right in zip(*sums, strict=True) if count]


def _bins(run: RunRecord, data: str) -> Any:
    """Of the final model by its headline."""
    answer = (run.get("answers") or {}).get("headline", "")
    stored = [r for r in run.get("reliability", ()) if r["answer"] == answer and r["data"] == data]
    by_model = {row["model"]: row["bins"] for row in stored}
    return by_model.get("after", by_model.get("before"))


def _line(place: int, method: Method, points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    look = {"stroke": "currentColor", "stroke_width": 2.0, "stroke_dasharray": svg.DASHES[place % len(svg.DASHES)]}
    path = " ".join(f"{number(x(sure))},{number(y(right))}" for sure, right in points)
    top = 16.0 + 22 * place
    return element(
        "g",
        element("polyline", points=path, fill="none", stroke_linejoin="round", **look),
        line(x.start, top - 4, x.start + 28, top - 4, **look),
        text(x.start + 36, top, svg.shorten(method.title, svg.WIDTH - x.start - 40)),
        class_=f"s{method.place % svg.NUM_COLOURS}",
    )
