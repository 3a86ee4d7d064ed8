"""How far probabilities can be trusted: log loss, calibration errors, and accuracy against confidence."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord, interval, summarise
from fedmoe.report.figures import Figure
from fedmoe.report.markdown import metric_text
from fedmoe.report.methods import Method, Row, final_losses, group

METRICS = {"ece": "ECE, own", "brier": "Brier, own"}


def calibration_table(results: Sequence[RunRecord]) -> dict[str, Any]:
    """Log loss is always measured; the others where `evaluation.metrics` names them. Regressions have neither."""
    if not figure_of(results).percent:
        return {"lines": []}
    rows, methods = summarise(results), group(results, every_answer=True)
    named = {name: title for name, title in METRICS.items() if any(row["metrics"].get(name) for row in rows)}
    lines = []
    for row, method in zip(rows, methods, strict=True):
        cells = [_mean_loss(method, data) for data in ("own", "global")]
        cells += [row["metrics"].get(name) for name in named]
        lines.append((row["title"], list(map(metric_text, cells))))
    return {"columns": ["Log loss, own", "Log loss, global", *named.values()], "lines": lines}


def _mean_loss(method: Method, data: str) -> Row | None:
    """Of final models, mean over clients, then over seeds."""
    means = [fmean(found) for run in method.runs if (found := final_losses(run, data))]
    return {"mean": fmean(means), "interval": interval(means)} if means else None


def reliability(results: Sequence[RunRecord]) -> Figure | None:
    """Accuracy against confidence on the clients' own data, a line for each method; on the diagonal they agree."""
    drawn = [(method, points) for method in group(results) if (points := reliability_of(method))]
    if not drawn:
        return None
    series = [{"name": method.title, "place": method.place, "points": points} for method, points in drawn]
    axes = {"label": "", "x": "Probability of the predicted label", "y": "Accuracy", "percent": True}
    words = [f"{m.title}: {', '.join(f'{a:.2f} at {c:.2f}' for c, a in points)}" for m, points in drawn]
    return Figure(
        "reliability",
        "Can probabilities be trusted?",
        "On the dotted line an answer is right as often as it says; below it, it says too much. Own test data.",
        "; ".join(words),
        "lines",
        {"views": [{**axes, "diagonal": True, "series": series}]},
    )


def reliability_of(method: Method) -> list[list[float]]:
    """(mean confidence, accuracy) of each bin that holds an example, over all clients and seeds."""
    found = [bins for run in method.runs if (bins := _bins(run))]
    sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
    if not sums:
        return []
    return [[round(sure / n, 4), round(right / n, 4)] for n, sure, right in zip(*sums, strict=True) if n]


def _bins(run: RunRecord) -> Any:
    """Of the final model by its headline."""
    answer = (run.get("answers") or {}).get("headline", "")
    stored = [r for r in run.get("reliability", ()) if r["answer"] == answer and r["data"] == "own"]
    by_model = {row["model"]: row["bins"] for row in stored}
    return by_model.get("after", by_model.get("before"))
