"""The table of a comparison for a README."""

from collections.abc import Sequence

from fedmoe.evaluation.figure_of_merit import ACCURACY, FigureOfMerit, figure_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report.methods import Row
from fedmoe.report.notes import notes


def markdown_table(results: Sequence[RunRecord]) -> str:
    """Accuracy in %, or RMSE, before → after personalisation; below it what a reader must know beside it."""
    rows, figure = summarise(results), figure_of(results)
    parts = ["own", "global", "unseen", *(["pooled"] if any(row["pooled"] for row in rows) else [])]
    metrics = list({name: None for row in rows for name in row["metrics"]})
    names = ["method", "own data", *parts[1:], "worst 10% of own", *map(_escape, metrics)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [score_text(row[part], figure) for part in parts]
        cells += [
            figure_text(row["own"], "worst_decile", figure),
            *(metric_text(row["metrics"].get(name)) for name in metrics),
        ]
        lines.append(f"| {_escape(row['title'])} | {' | '.join(cells)} |")
    footnotes = [line for note in notes(results) for line in ("", _escape(note))]
    return "\n".join([*lines, *footnotes]) + "\n"


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
