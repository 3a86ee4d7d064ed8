"""The figures of a page as plain data: report.js draws them, and each says in words what it shows.

A figure without data is None. Kinds, and what report.js reads of each:

    points   views: [{label, x, y, points: [{name, place, x, y, x_half, y_half}]}]
    lines    views: [{label, x, y, percent, series: [{name, place, points: [[x, y], ...]}]}]
    heat     rows, columns, frames: [{label, values}]    (a value is a share of the darkest colour, or a count)
    bars     views: [{label, bars: [{name, value}]}]
    clients  chart: "strips", "own_global" or "worth"    (the scores themselves are in the page once)
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report.methods import Method, client_names, group, thin, training_losses
from fedmoe.report.runs import StoredRun

GIGABYTE = 1e9
CURVES = {
    "own": "clients' own test data",
    "global": "the balanced global test",
    "unseen": "unseen clients' data",
    "pooled": "the pooled data, for a new client",
}
AXES = {"round": "Round", "bytes": "GB sent, up and down"}
MOST_TENSORS = 12
DIGITS = 4

Data = dict[str, Any]


class Figure(NamedTuple):
    """`alt` is what a screen reader says in place of the picture."""

    name: str
    title: str
    caption: str
    alt: str
    kind: str
    data: Data


def trade_off(results: Sequence[RunRecord]) -> Figure | None:
    """What each method buys (its score on a client's own data) and costs (its score on everyone's data)."""
    merit = figure_of(results)
    rows = [(place, row) for place, row in enumerate(summarise(results)) if row["own"] and row["global"]]
    if not rows:
        return None
    points = [
        {
            "name": row["title"], "place": place,
            "x": _short(row["global"]["mean"]), "x_half": _short(row["global"]["interval"] or 0.0),
            "y": _short(row["own"]["mean"]), "y_half": _short(row["own"]["interval"] or 0.0),
        }
        for place, row in rows
    ]  # fmt: skip
    up, right = ("Higher", "right") if merit.higher_is_better else ("Lower", "left")
    crosses = " A cross is the 95% interval over seeds." if any(row["seeds"] > 1 for _, row in rows) else ""
    return Figure(
        "trade-off",
        "What each method buys and costs",
        f"{up} is better for each client at home, further {right} is better on everyone's data.{crosses}",
        "; ".join(f"{p['name']}: own {merit.with_unit(p['y'])}, global {merit.with_unit(p['x'])}" for p in points),
        "points",
        {
            "x": f"{merit.name} on the {'balanced ' * merit.percent}global test",
            "y": f"{merit.name} on clients' own test data",
            "points": points,
        },
    )


def learning_curves(methods: Sequence[Method]) -> Figure | None:
    """Scores before personalisation, over rounds and over bytes; where runs were evaluated between rounds."""
    views, merit = [], figure_of([run for method in methods for run in method.runs])
    for kind, what in CURVES.items():
        for axis, label in AXES.items():
            series = [_series(method, points) for method in methods if (points := curve_of(method, kind, axis))]
            if series:
                how = "rounds" if axis == "round" else "bytes"
                named = {"label": f"on {what}, over {how}", "x": label, "y": f"{merit.name} on {what}"}
                views.append({**named, "percent": merit.percent, "series": series})
    return Figure(
        "learning-curves",
        f"{merit.name} while training",
        "Before personalisation; mean over clients and seeds.",
        f"{merit.name} {views[0]['label']}. {ends_of(views[0])}",
        "lines",
        {"views": views},
    ) if views else None  # fmt: skip


def curve_of(method: Method, kind: str, axis: str) -> list[tuple[float, float]]:
    """Means over the seeds, at the rounds in which all of them were evaluated."""
    runs = [{point["round"]: point for point in run.get("curve", ())} for run in method.runs]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    shown = [[run[number] for run in runs] for number in rounds]
    return [
        (fmean(_across(point, axis) for point in points), fmean(point[kind] for point in points))
        for points in shown
        if all(point[kind] is not None for point in points)
    ]


def _across(point: Mapping[str, float], axis: str) -> float:
    return point["round"] if axis == "round" else (point["bytes_up"] + point["bytes_down"]) / GIGABYTE


def training_loss(results: Sequence[RunRecord]) -> Figure | None:
    """Methods with the same rounds are one line, in the colour of the first."""
    shared: dict[tuple[tuple[int, float], ...], list[Method]] = {}
    for method in group(results):
        if losses := training_losses(method):
            shared.setdefault(tuple(losses.items()), []).append(method)
    if not shared:
        return None
    series = [
        {"name": ", ".join(m.title for m in methods), "place": methods[0].place, "points": thinned(losses)}
        for losses, methods in shared.items()
    ]
    view = {"label": "", "x": "Round", "y": "Training loss", "percent": False, "series": series}
    caption = "What clients report while they train together; methods that share the same rounds share a line."
    return Figure("training-loss", "Training loss", caption, ends_of(view), "lines", {"views": [view]})


def split_map(run: RunRecord) -> Figure | None:
    """Training examples of each client (row) and class (column)."""
    counts = run.get("class_counts")
    if not counts or not counts[0]:
        return None
    names = client_names(run)
    data = {
        "rows": [names.get(client, str(client)) for client in range(len(counts))],
        "columns": list(run["class_names"]) or list(range(len(counts[0]))),
        "row": "Client", "column": "Class", "value": "training examples", "frames": [{"label": "", "values": counts}],
    }  # fmt: skip
    largest = np.asarray(counts).max()
    alt = f"{len(counts)} clients in rows, {len(counts[0])} classes in columns, up to {largest} training examples each."
    caption = f"Seed {run['seed']}. The more rows differ, the less alike the clients."
    return Figure("split", "Who holds what", caption, alt, "heat", data)


def bytes_sent(methods: Sequence[tuple[Method, StoredRun]]) -> Figure | None:
    """Tensors that left the clients, in the first seed of each method; those that need most bytes."""
    views, largest_of = [], []
    for method, run in methods:
        sizes = [
            (f"{exchange}: {name}", counts["bytes"])
            for exchange, tensors in run.manifest.get("sent_by_clients", {}).items()
            for name, counts in tensors.items()
        ]
        if sizes:
            largest = sorted(sizes, key=lambda pair: (-pair[1], pair[0]))
            largest_of.append(f"{method.title}: most bytes for {largest[0][0]}")
            shown, rest = largest[:MOST_TENSORS], largest[MOST_TENSORS:]
            if rest:
                shown.append((f"{len(rest)} smaller tensors", sum(size for _, size in rest)))
            views.append({"label": method.title, "bars": [{"name": name, "value": size} for name, size in shown]})
    if not views:
        return None
    caption = "All bytes of one run by exchange and tensor, experts one by one. The whole list is manifest.json."
    return Figure(
        "bytes-sent", "What left the clients, by tensor", caption, "; ".join(largest_of), "bars", {"views": views}
    )


def _series(method: Method, points: Iterable[tuple[float, float]]) -> Data:
    return {"name": method.title, "place": method.place, "points": thinned(points)}


def thinned(points: Iterable[tuple[float, float]]) -> list[list[float]]:
    return [[_short(x), _short(y)] for x, y in thin(list(points))]


def _short(value: float) -> float:
    """Few digits make a small page; what is drawn needs no more."""
    return round(value, DIGITS) if abs(value) < 10 else float(f"{value:.6g}")


def ends_of(view: Mapping[str, Any]) -> str:
    form = ".1%" if view["percent"] else ".3g"
    ends = (
        f"{one['name']}: from {one['points'][0][1]:{form}} to {one['points'][-1][1]:{form}}" for one in view["series"]
    )
    return "; ".join(ends)
