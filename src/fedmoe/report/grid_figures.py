"""Figures of a grid: scores over its settings, at home against everywhere, and what happened in the rounds."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe.evaluation.claims import Model, by_seed
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.report.expert_figures import divergence, expert_accuracy
from fedmoe.report.figures import Figure, learning_curves
from fedmoe.report.grid import GridPoint, values_of, words_of
from fedmoe.report.methods import Method, group
from fedmoe.report.page import PARTS

POWERS = 50.0  # an axis whose values reach so many times its least one is drawn in powers


def grid_figures(points: Sequence[GridPoint], model: Model = "final", metric: str | None = None) -> list[Figure]:
    by_point = methods_by_point(points)
    made = [
        scores_over_grid(points, model, metric), own_against_global(points, model, metric), learning_curves(by_point),
        expert_accuracy(by_point), divergence(by_point),
    ]  # fmt: skip
    return [figure for figure in made if figure]


def methods_by_point(points: Sequence[GridPoint]) -> list[Method]:
    """Each method at each point, in the colour that it has everywhere."""
    places = {method.title: method.place for method in group([run for point in points for run in point.results])}
    return [
        Method(places[method.title], ", ".join(filter(None, (method.title, words_of(point.point)))), method.runs)
        for point in points
        for method in group(point.results)
    ]


def scores_over_grid(points: Sequence[GridPoint], model: Model = "final", metric: str | None = None) -> Figure | None:
    """Scores over the first setting whose values are numbers; a line for each method and combination of the others."""
    axis = next((i for i, (_, value) in enumerate(points[0].point) if _number(value) is not None), None)
    if axis is None or len({point.point[axis][1] for point in points}) < 2:
        return None
    results = [run for point in points for run in point.results]
    merit, methods = figure_of(results, metric), group(results, every_answer=True)
    values = [float(point.point[axis][1]) for point in points]
    in_powers = min(values) > 0 and max(values) / min(values) >= POWERS
    views = []
    for part, title in PARTS.items():
        series: dict[str, dict[str, Any]] = {}
        for point in points:
            others = words_of(tuple(pair for i, pair in enumerate(point.point) if i != axis))
            for method in methods:
                means = by_seed(point.results, method.title, part, model, metric)  # type: ignore[arg-type]
                if means:
                    name = f"{method.title}, {others}" if others else method.title
                    line = series.setdefault(name, {"name": name, "place": method.place, "points": []})
                    line["points"].append([_number(point.point[axis][1]), round(fmean(means.values()), 4)])
        if series:
            for line in series.values():
                line["points"].sort()
            axes = {
                "label": title,
                "x": points[0].point[axis][0],
                "log": in_powers,
                "y": f"{merit.name}: {title.lower()}",
            }
            views.append({**axes, "percent": merit.percent, "dots": True, "series": list(series.values())})
            if "FedAvg" in series and merit.percent:
                shares = [line for name, line in _shares(series, "FedAvg").items() if name != "FedAvg"]
                words = f"{title}, as a share of FedAvg's"
                views.append({**axes, "label": words, "y": words, "percent": True, "dots": True, "series": shares})
    alt = "The same numbers as in the tables."
    title = f"{merit.name} over {points[0].point[axis][0]}"
    return Figure("grid", title, "Mean over clients and seeds.", alt, "lines", {"views": views}) if views else None


def _shares(series: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, dict[str, Any]]:
    """Every line divided by that of the base, where both have a point."""
    of_base = {x: y for x, y in series[base]["points"] if y}
    return {
        name: {**line, "points": [[x, round(y / of_base[x], 4)] for x, y in line["points"] if x in of_base]}
        for name, line in series.items()
    }


def own_against_global(points: Sequence[GridPoint], model: Model = "final", metric: str | None = None) -> Figure | None:
    """Where each method stands at each point of the grid: at home, and on everyone's data."""
    results = [run for point in points for run in point.results]
    merit, shown = figure_of(results, metric), []
    for point in points:
        for method in group(results, every_answer=True):
            own, everyone = (
                by_seed(point.results, method.title, part, model, metric).values() for part in ("own", "global")
            )
            if own and everyone:
                name = " ".join([method.title, *values_of(point.point)])
                at = {"x": round(fmean(everyone), 4), "y": round(fmean(own), 4), "x_half": 0.0, "y_half": 0.0}
                shown.append({"name": name, "place": method.place, **at})
    axes = {"x": f"{merit.name} on the global test", "y": f"{merit.name} on clients' own test data"}
    caption = "One dot for each method and point of the grid; mean over clients and seeds."
    title, alt = "At home and everywhere", "The same numbers as in the tables."
    return Figure("own-against-global", title, caption, alt, "points", {**axes, "points": shown}) if shown else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
