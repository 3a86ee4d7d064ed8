"""Runs as plain text, for a Python prompt: what happened, a table of scores, and the clients one by one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedmoe.evaluation.answers import with_headline
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.metric_catalog import class_in, title_of
from fedmoe.evaluation.summary import RunRecord, final_model, summarise
from fedmoe.report.markdown import class_blocks, figure_text, metric_text, score_text
from fedmoe.report.methods import client_names
from fedmoe.report.notes import notes

SHOWN_CLIENTS = 20
SHOWN_CLASSES = 8  # beside other columns of a line; results.json and `client_rows` have all


def align(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """
    >>> print(align(["client", "rows"], [["north", "120"], ["sea", "7"]]))
    client  rows
    north    120
    sea        7
    """
    table = [head, *rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(head))]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def headline(run: RunRecord) -> str:
    """One line: the method, how many clients and rounds, own and global accuracy or error."""
    figure = figure_of([run])
    clients = {score["client"] for score in run["scores"] if not score["unseen"]}
    row, *_ = summarise([run])  # the first is that of its headline
    scores = [
        f"{name} {score_text(row[part], figure)} {'%' if figure.percent else figure.name}"
        for part, name in (("own", "own data"), ("global", "global"))
        if row[part]
    ]
    facts = [f"seed {run['seed']}", f"{run['rounds']} rounds", f"{len(clients)} clients scored", *scores]
    return f"{run['title']}: {', '.join(facts)}"


def summary_text(results: Sequence[RunRecord]) -> str:
    """The scores of each method, before → after personalisation; recall by class where it was measured; notes."""
    rows, figure = summarise(results), figure_of(results)
    parts = [part for part in ("own", "global", "unseen", "pooled") if any(row[part] for row in rows)]
    metrics = list({name: None for row in rows for name in row["metrics"]})
    head = [
        figure.heading,
        *("own data" if part == "own" else part for part in parts),
        "worst 10%",
        *map(title_of, metrics),
    ]
    cells = [
        [
            row["title"],
            *(score_text(row[part], figure) for part in parts),
            figure_text(row["own"], "worst_decile", figure),
            *(metric_text(row["metrics"].get(name)) for name in metrics),
        ]
        for row in rows
    ]
    blocks = [align(head, cells)]
    for title, classes, by_method in class_blocks(results, rows):
        blocks.append(align([f"{title.lower()} by class", *classes], by_method))
    return "\n\n".join([*blocks, *notes(results)])


def clients_text(run: RunRecord) -> str:
    """The final model of each client on its own data; of many clients, the worst."""
    rows = client_rows(run)
    if not rows:
        return "No client was asked for its scores."
    figure = figure_of([run])
    worst = sorted(rows, key=lambda row: row[figure.key], reverse=not figure.higher_is_better)
    shown = rows if len(rows) <= SHOWN_CLIENTS else worst[:SHOWN_CLIENTS]
    names = [name for name in shown[0] if name not in ("client", "unseen", "examples", figure.key, "loss")]
    if len(run.get("class_names") or ()) > SHOWN_CLASSES:
        names = [name for name in names if name in run["scores"][0]["metrics"]]  # those of one class have other names
    head = ["client", "rows", figure.key, "loss", *names]
    cells = [
        [
            row["client"] + (" (unseen)" if row["unseen"] else ""),
            str(row["examples"]),
            figure.text(row[figure.key]),
            *(_number(row[name]) for name in ("loss", *names)),
        ]
        for row in shown
    ]
    lowest = "lowest" if figure.higher_is_better else "highest"
    more = "" if len(shown) == len(rows) else f"\nThe {len(shown)} with the {lowest} {figure.key} of {len(rows)}."
    return align(head, cells) + more


def client_rows(run: RunRecord) -> list[dict[str, Any]]:
    """A dict per client: its name, and how its final model does on its own test rows."""
    run = with_headline(run)
    names, model = client_names(run) or {}, final_model(run)
    return [
        {
            "client": names.get(score["client"], str(score["client"])),
            "unseen": score["unseen"],
            "examples": score["examples"],
            **({"accuracy": score["accuracy"]} if "accuracy" in score else {}),
            "loss": score["loss"],
            **_named(score.get("metrics", {}), run.get("class_names") or ()),
        }
        for score in run["scores"]
        if score["data"] == "own" and score["model"] == model
    ]


def _named(metrics: Mapping[str, float], classes: Sequence[str]) -> dict[str, float]:
    """A metric of one class by the name of that class."""
    named = {}
    for name, value in metrics.items():
        of = class_in(name)
        named[f"{of[0]} {classes[of[1]]}" if of and of[1] < len(classes) else name] = value
    return named


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
