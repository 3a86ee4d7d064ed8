"""Tables in the terminal. Needs no tensors: what is shown has been computed, or stored, before."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.metric_catalog import title_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report.markdown import class_blocks, figure_text, metric_text, score_text

if TYPE_CHECKING:
    from fedmoe.data.available import SourceStatus
    from fedmoe.explain import Explanation
    from fedmoe.partition.split import Split
    from fedmoe.report.grid import GridPoint
    from fedmoe.report.sweep import PaperPart
    from fedmoe.sweeps.cost import Cost
    from fedmoe.sweeps.reproduction import Reproduction

SHOWN_ROWS = 20  # of a table of predictions
MOST_CLASS_COLUMNS, SHOWN_CLASSES = 5, 3  # where classes are more than columns, each row has its likeliest few
LIKELIEST = "most likely"
FEW_METRICS = 2  # more get a table of their own: a terminal has 80 columns


def score_table(results: Sequence[RunRecord], title: str) -> Table:
    """Accuracy in percent, or RMSE: mean over clients (and seeds)."""
    figure = figure_of(results)
    seeds = len({result["seed"] for result in results})
    table = Table(
        title=f"{escape(title)}: {figure.heading}, mean over clients"
        + (f", ± 95% over {seeds} seeds" if seeds > 1 else ""),
        caption="own: each client's test data; global: balanced; a→b: before and after personalising",
    )
    rows = summarise(results)
    possible = ("global_validation", "unseen", "tuning", "pooled")
    more = [part for part in possible if any(row[part] for row in rows)]
    table.add_column("method", overflow="fold")  # wraps first, being the widest
    metrics = _metrics(rows) if len(_metrics(rows)) <= FEW_METRICS else []
    for column in (
        "own data",
        "global",
        *(part.replace("_", " ") for part in more),
        "worst 10%",
        "spread",
        *(escape(title_of(name)) for name in metrics),
    ):
        table.add_column(column, justify="right", overflow="fold")  # a number may wrap, but is never cut
    for row in rows:
        cells = [score_text(row[part], figure) for part in ("own", "global", *more)]
        cells += [figure_text(row["own"], key, figure) for key in ("worst_decile", "spread")]
        table.add_row(escape(row["title"]), *cells, *(metric_text(row["metrics"].get(name)) for name in metrics))
    return table


def metric_tables(results: Sequence[RunRecord]) -> list[Table]:
    """A table of the metrics that are too many for that of the scores; none where they are there."""
    rows = summarise(results)
    metrics = _metrics(rows)
    if len(metrics) <= FEW_METRICS:
        return []
    table = Table(title="Mean over clients of the final model, own data")
    table.add_column("method", overflow="fold")
    for name in metrics:
        table.add_column(escape(title_of(name)), justify="right", overflow="fold")
    for row in rows:
        table.add_row(escape(row["title"]), *(metric_text(row["metrics"].get(name)) for name in metrics))
    return [table]


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list({name: None for row in rows for name in row["metrics"]})


def class_tables(results: Sequence[RunRecord]) -> list[Table]:
    """One for each metric that is measured per class."""
    tables = []
    for title, classes, rows in class_blocks(results, summarise(results)):
        table = Table(title=f"{title} by class: mean over the clients that have it, own data")
        for column in ("method", *classes):
            table.add_column(escape(column), justify="left" if column == "method" else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        tables.append(table)
    return tables


def split_table(counts: NDArray[np.int64], class_names: Sequence[str], num_clients: int) -> Table:
    """Training examples per client and class, darker is more; at most forty clients and forty classes."""
    shown, names = counts[:40, :40], list(class_names)[:40]
    table = Table(title=f"training examples: {len(counts)} clients, {counts.shape[1]} classes", pad_edge=False)
    table.add_column("client", justify="right")
    for name in names:
        table.add_column(name[:6], justify="right")
    table.add_column("all", justify="right")
    for client, row in enumerate(shown):
        label = str(client) if client < num_clients else f"{client} unseen"
        table.add_row(label, *(_shade(n, int(shown.max())) for n in row), str(counts[client].sum()))
    return table


def _shade(count: int, largest: int) -> str:
    share = count / max(largest, 1)
    style = "dim" if share < 0.1 else "bold" if share > 0.5 else "default"
    return f"[{style}]{count or '·'}[/{style}]"


def split_facts(split: "Split", counts: NDArray[np.int64]) -> str:
    """Sizes, and the overlap of clients: the mean over pairs of the sum over classes of the smaller share."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    some = shares[np.linspace(0, len(shares) - 1, min(len(shares), 200)).astype(int)]
    pairs = np.minimum(some[:, None], some[None]).sum(-1)[np.triu_indices(len(some), 1)]
    overlap = f"{pairs.mean():.2f}" if len(pairs) else "–"
    lines = [
        f"{name:<11} {part.sizes.min()} to {part.sizes.max()} per client, {part.sizes.sum():,} in all"
        for name, part in (("train", split.train), ("validation", split.validation), ("own test", split.test))
    ]
    lines.append(f"global test {len(split.global_test):,}")
    if len(split.global_validation):
        lines.append(f"global validation {len(split.global_validation):,}, which no client holds")
    if split.domains is not None:
        held = ", ".join(f"{domain}: {number}" for domain, number in enumerate(np.bincount(split.domains)))
        lines.append(f"domains     {held} clients")
    return "\n".join(
        [*lines, f"overlap of clients {overlap} (1: all alike, 0: no class in common)", f"hash {split.digest}"]
    )


def audit_table(found: dict[str, Any]) -> Table:
    """How near each attack comes to the clients' label distributions."""
    table = Table(
        title=f"{found['algorithm']}: what the server can read of {len(found['truth'])} clients' labels",
        caption="total variation distance to the truth; 0: read exactly",
    )
    table.add_column("attack", overflow="fold")
    for column in ("round", "mean", "nearest", "farthest"):
        table.add_column(column, justify="right")
    guess = {"attack": "[dim]a uniform guess[/dim]", "round": "–", **found["uniform_guess"]}
    for row in (*found["attacks"], guess):
        numbers = (f"{row[key]:.3f}" for key in ("mean", "nearest", "farthest"))
        table.add_row(row["attack"], str(row["round"]), *numbers)
    return table


def data_table(sources: Sequence["SourceStatus"], folder: Path | None) -> Table:
    table = Table(title=f"Data sets{f' in {folder}' if folder else ' (set FEDMOE_DATA to the folder that holds them)'}")
    for column in ("name", "what", "train", "test", "classes", "here"):
        table.add_column(column, justify="right" if column in ("train", "test", "classes") else "left")
    for source in sources:
        here = "[green]yes[/green]" if source.present else "no: " + ", ".join(source.missing[:2])
        counts = (f"{source.train_rows:,}", f"{source.test_rows:,}", str(source.num_classes))
        table.add_row(source.name, source.title, *counts, here)
    return table


def explanation_table(found: "Explanation") -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("backend", f"[bold]{found.backend}[/bold]: {found.why}")
    table.add_row("model", f"{found.weights:,} weights" + "".join(f"\n  {layer}" for layer in found.layers))
    table.add_row("workers", str(found.workers))
    if found.seconds_per_round is None:
        table.add_row("rounds", "none: clients send nothing")
    else:
        total = found.rounds * found.seconds_per_round
        table.add_row(
            "rounds",
            f"{found.rounds} of about {found.seconds_per_round:.2g} s (measured on a few): {duration(total)}, without "
            "validation, personalisation and scores",
        )
    for note in found.notes:
        table.add_row("note", note)
    return table


def duration(seconds: float) -> str:
    """
    >>> duration(50), duration(600), duration(9000)
    ('50 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def prediction_table(columns: Mapping[str, Sequence[Any]], title: str) -> Table:
    """The first rows of what a model predicts; of many classes the likeliest few."""
    total = len(next(iter(columns.values())))
    shares = {name[2:-1]: column for name, column in columns.items() if name.startswith("p(")}
    notes = [f"the first {SHOWN_ROWS} of {total} rows"] if total > SHOWN_ROWS else []
    if len(shares) > MOST_CLASS_COLUMNS:
        columns = {name: column for name, column in columns.items() if not name.startswith("p(")}
        columns[LIKELIEST] = [likeliest(shares, row) for row in zip(*shares.values(), strict=True)]
        notes.append(f"the {SHOWN_CLASSES} likeliest of {len(shares)} classes")
    table = Table(title=escape(title), caption=f"{', '.join(notes)}; --to FILE writes all" if notes else None)
    table.add_column("row", justify="right")
    for name in columns:
        table.add_column(escape(name), justify="left" if name in ("class", LIKELIEST) else "right", overflow="fold")
    for row, cells in enumerate(zip(*columns.values(), strict=True)):
        if row < SHOWN_ROWS:
            table.add_row(str(row), *(f"{cell:.4f}" if isinstance(cell, float) else escape(cell) for cell in cells))
    return table


def likeliest(names: Iterable[str], shares: Sequence[float]) -> str:
    best = sorted(zip(names, shares, strict=True), key=lambda pair: -pair[1])[:SHOWN_CLASSES]
    return ", ".join(f"{name}: {share:.4f}" for name, share in best)


def grid_tables(points: "Sequence[GridPoint]", paper: "PaperPart | None" = None) -> list[Table]:
    """One for each kind of score, a row for each point; and the claims of a paper, as decided."""
    from fedmoe.report.sweep import entry_text, shown_tables

    tables = []
    for found in shown_tables(points, paper):
        table = Table(title=f"{found.title}, mean ± 95%" + (" (published)" if paper and paper.published else ""))
        for name in found.keys:
            table.add_column(escape(name), overflow="fold")
        for name in found.methods:
            table.add_column(escape(name), justify="right", overflow="fold")
        for values, entries in found.rows:
            table.add_row(*map(escape, values), *(escape(entry_text(entry)) for entry in entries))
        tables.append(table)
    for claim in paper.claims if paper else ():
        table = Table(title=escape(claim["says"]), caption=escape(claim["how"]))
        for name in ("at", "difference", "seeds", "verdict"):
            table.add_column(name, justify="right")
        for line in claim["lines"]:
            table.add_row(line["at"], line["difference"], str(line["seeds"]), line["verdict"])
        tables.append(table)
    return tables


def reproduction_table(rows: "Sequence[tuple[Reproduction, Cost, int, int]]") -> Table:
    """What can be reproduced, about how long it takes here, and what has been run."""
    table = Table(
        box=SIMPLE, caption="time: all of it, an order of magnitude from a few timed rounds; --quick needs seconds"
    )
    table.add_column("paper, figure", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("time here", "runs done"):
        table.add_column(name, justify="right", no_wrap=True)
    for one, cost, done, total in rows:
        time = "not timed" if cost.seconds is None else duration(cost.seconds)
        table.add_row(f"{one.paper} {one.figure}", escape(one.title), time, f"{done} of {total}")
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """A line for each fact."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, words in facts.items():
        table.add_row(escape(name), escape(words))
    return table
