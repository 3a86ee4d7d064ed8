"""The table of a comparison for a README."""

from collections.abc import Sequence
from typing import Any

from fedmoe.evaluation.figure_of_merit import ACCURACY, FigureOfMerit, figure_of
from fedmoe.evaluation.metric_catalog import title_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report.methods import Row
from fedmoe.report.notes import notes


def markdown_table(results: Sequence[RunRecord]) -> str:
    """Accuracy in %, or RMSE, before → after personalisation; below it what a reader must know beside it."""
    rows, figure = summarise(results), figure_of(results)
    more = [part for part in ("global_validation", "tuning", "pooled") if any(row[part] for row in rows)]
    parts = ["own", "global", "unseen", *more]
    metrics = list({name: None for row in rows for name in row["metrics"]})
    names = [
        "method",
        "own data",
        *(part.replace("_", " ") for part in parts[1:]),
        "worst 10% of own",
        *(_escape(title_of(name)) for name in metrics),
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [score_text(row[part], figure) for part in parts]
        cells += [
            figure_text(row["own"], "worst_decile", figure),
            *(metric_text(row["metrics"].get(name)) for name in metrics),
        ]
        lines.append(f"| {_escape(row['title'])} | {' | '.join(cells)} |")
    lines += [line for block in class_blocks(results, rows) for line in ("", *_class_lines(*block))]
    footnotes = [line for note in notes(results) for line in ("", _escape(note))]
    return "\n".join([*lines, *footnotes]) + "\n"


def class_blocks(results: Sequence[RunRecord], rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Of each metric that is measured per class: its title, the names of classes, and cells by method."""
    classes: Sequence[Any] = next((run["class_names"] for run in results if run.get("class_names")), [])
    blocks = []
    for metric in dict.fromkeys(name for row in rows for name in row["by_class"]):
        shown = [
            [row["title"], *map(metric_text, row["by_class"][metric])] for row in rows if metric in row["by_class"]
        ]
        size = max(map(len, shown)) - 1
        names = [str(name) for name in classes] if len(classes) == size else [str(label) for label in range(size)]
        blocks.append((title_of(metric), names, shown))
    return blocks


def _class_lines(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = [f"{title.lower()} by class", *map(_escape, names)]
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(map(_escape, row))} |" for row in rows),
    ]


def score_text(cell: Row | None, figure: FigureOfMerit = ACCURACY) -> str:
    """
    >>> score_text({"mean": 0.5, "interval": 0.01, "before": 0.4})
    '40.0→50.0 ± 1.0'
    """
    if cell is None:
        return "–"
    interval = "" if cell["interval"] is None else f" ± {figure.text(cell['interval'])}"
    before = "" if cell["before"] is None else f"{figure.text(cell['before'])}→"
    return f"{before}{figure.text(cell['mean'])}{interval}"


def metric_text(cell: Row | None) -> str:
    """
    >>> metric_text({"mean": 0.51234, "interval": None})
    '0.512'
    """
    if cell is None:
        return "–"
    return f"{cell['mean']:.3g}" + ("" if cell["interval"] is None else f" ± {cell['interval']:.2g}")


def figure_text(cell: Row | None, key: str, figure: FigureOfMerit) -> str:
    return "–" if cell is None else figure.text(cell[key])


def _escape(words: str) -> str:
    """As in FedMix q(z|y); names of clients are the user's, and may hold anything."""
    return " ".join(words.split()).replace("|", r"\|").replace("<", "&lt;")
