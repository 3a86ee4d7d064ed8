"""Figures of experts over the rounds: who does the work, what each is for, how good each is, how far clients part."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe.report.figures import Figure, ends_of, thinned
from fedmoe.report.methods import Method
from fedmoe.report.runs import StoredRun

WINDOWS = 20  # a sliding mean is over this fraction of the rounds
ACCURACY_OF = "expert_accuracy:"  # and the number of an expert: what an algorithm measures of each


def expert_figures(method: Method, run: StoredRun) -> list[Figure]:
    """Of one seed: who does the work, how sure the gates are, and what each expert is for; none for a single expert."""
    events = [event for event in run.results["history"] if event.get("experts")]
    if not events or len(events[0]["experts"]["load"]) < 2:
        return []
    made = [_expert_load(method, events), _gate_entropy(method, events), _expert_map(method, run)]
    return [figure for figure in made if figure]


def _expert_load(method: Method, events: Sequence[Mapping[str, Any]]) -> Figure:
    num_experts, last = len(events[0]["experts"]["load"]), events[-1]
    series = [
        {
            "name": f"expert {expert}", "place": expert,
            "points": thinned([(event["round"], event["experts"]["load"][expert]) for event in events]),
        }
        for expert in range(num_experts)
    ]  # fmt: skip
    shares = ", ".join(f"expert {k} {load:.0%}" for k, load in enumerate(last["experts"]["load"]))
    view = {"label": "", "x": "Round", "y": "Share of the work", "percent": True, "series": series}
    return Figure(
        f"expert-load-{method.place}",
        f"{method.title}: who does the work",
        f"Each expert's share of the clients' examples; an even share is {1 / num_experts:.0%}.",
        f"In round {last['round']}: {shares}.",
        "lines",
        {"views": [view], "own_colours": True},
    )


def _gate_entropy(method: Method, events: Sequence[Mapping[str, Any]]) -> Figure | None:
    points = [(e["round"], e["experts"]["usage_entropy"]) for e in events if "usage_entropy" in e["experts"]]
    if not points:
        return None
    series = [{"name": method.title, "place": method.place, "points": thinned(points)}]
    view = {"label": "", "x": "Round", "y": "Entropy, in nats", "percent": False, "zero": True, "series": series}
    caption = "Of the experts on a client, mean over clients: 0 is one expert, a high value all alike."
    return Figure(
        f"gate-entropy-{method.place}", f"{method.title}: how many experts a client uses", caption,
        ends_of(view), "lines", {"views": [view], "own_colours": True},
    )  # fmt: skip


def _expert_map(method: Method, run: StoredRun) -> Figure | None:
    last = run.results.get("assignment")
    maps = list(run.expert_maps) or ([{"round": run.results["rounds"], **last}] if last else [])
    if not maps:
        return None
    of, shares = maps[-1]["of"], maps[-1]["shares"]
    names = run.results.get("class_names") or []
    rows = names if of == "label" and len(names) == len(shares) else [str(row) for row in range(len(shares))]
    frames = [{"label": f"round {one['round']}", "values": one["shares"]} for one in maps]
    first = [max(range(len(row)), key=row.__getitem__) for row in shares]
    alt = "; ".join(f"{of} {name}: expert {k}" for name, k in zip(rows[:20], first, strict=False))
    data = {
        "rows": rows, "columns": list(range(len(shares[0]))), "row": of.capitalize(), "column": "Expert",
        "value": "share", "frames": frames,
    }  # fmt: skip
    caption = f"One row for each {of}: the share of each expert; the darker, the more."
    title = f"{method.title}: what each expert is for"
    return Figure(f"expert-map-{method.place}", title, caption, f"In the end: {alt}.", "heat", data)


def divergence(methods: Sequence[Method]) -> Figure | None:
    """How far apart clients pull the same parameters (Reisser et al. 2021, eq. 16 and 17), where it was watched."""
    series = []
    for method in methods:
        rounds: dict[int, list[float]] = {}
        for event in (event for run in method.runs for event in run.get("history", ())):
            known = [value for value in (event.get("experts") or {}).get("divergence", ()) if value is not None]
            if known:
                rounds.setdefault(event["round"], []).append(fmean(known))
        if rounds:
            points = sliding_mean([(number, fmean(values)) for number, values in sorted(rounds.items())])
            series.append({"name": method.title, "place": method.place, "points": thinned(points)})
    if not series:
        return None
    view = {"label": "", "x": "Round", "y": "Divergence", "percent": False, "zero": True, "series": series}
    caption = (
        "Of the clients' updates: 0 where all move a parameter the same way, up to a half for each parameter where "
        "they cancel out, added up over parameters. Mean over experts and seeds, in a sliding window."
    )
    return Figure("divergence", "How far apart clients pull", caption, ends_of(view), "lines", {"views": [view]})


def sliding_mean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Over the rounds up to each one.

    >>> sliding_mean([(1, 0.2), (2, 0.4)])
    [(1, 0.2), (2, 0.4)]
    """
    width = max(1, len(points) // WINDOWS)
    windows = ([value for _, value in points[max(0, at - width + 1) : at + 1]] for at in range(len(points)))
    return [(number, fmean(window)) for (number, _), window in zip(points, windows, strict=True)]


def expert_accuracy(methods: Sequence[Method]) -> Figure | None:
    """Each expert alone on the examples of the clients that hold it; of the first seed of each method."""
    views = [view for method in methods if (view := _accuracies(method))]
    if not views:
        return None
    caption = "On the test examples of the clients that hold the expert, new ones where there are any; first seed."
    title = "How good each expert is"
    return Figure(
        "expert-accuracy", title, caption, f"{views[0]['label']}: {ends_of(views[0])}", "lines",
        {"views": views, "own_colours": True},
    )  # fmt: skip


def _accuracies(method: Method) -> dict[str, Any] | None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in method.runs[0].get("curve", ()):
        by_kind = point.get("metrics") or {}
        measured = by_kind.get("unseen") or by_kind.get("own") or {}
        for name, value in sorted(measured.items()):
            if name.startswith(ACCURACY_OF):
                lines.setdefault(f"expert {name.removeprefix(ACCURACY_OF)}", []).append((point["round"], value))
            elif name == "common_accuracy":
                lines.setdefault("common expert", []).append((point["round"], value))
    if not any(name.startswith("expert") for name in lines):
        return None
    named = sorted(lines, key=lambda name: (name.startswith("common"), len(name), name))
    series = [{"name": name, "place": place, "points": thinned(lines[name])} for place, name in enumerate(named)]
    return {"label": method.title, "x": "Round", "y": "Accuracy", "percent": True, "series": series}
