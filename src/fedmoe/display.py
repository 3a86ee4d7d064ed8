"""What a person sees in the terminal: a progress bar per stage, tables, and the summary page."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fedmoe.data.fetch import Progress as Fetched
from fedmoe.data.loading import SourceStatus
from fedmoe.engines.session import RoundRecord
from fedmoe.evaluation.summary import summarise
from fedmoe.experiment import Advanced, Event, Started
from fedmoe.explain import Explanation
from fedmoe.partition.split import Split
from fedmoe.report.html import render


class RunProgress:
    """One line per run: its stage, how far it is, time left, and what the last round told."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("[dim]{task.fields[detail]}[/dim]"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stages: dict[str, str] = {}

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, label: str, event: Event) -> None:
        if isinstance(event, Started):
            for note in event.notes:
                self._console.print(f"[yellow]{label}: {note}[/yellow]")
            if event.resumed_from:
                self._console.print(f"{label}: going on after round {event.resumed_from} of {event.rounds}")
            self._update(label, "rounds", event.resumed_from, event.rounds)
        elif isinstance(event, RoundRecord):
            told = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in event.reports.items()]
            refused = [f"[red]{event.refused} refused[/red]"] if event.refused else []
            for warning in event.warnings:
                self._console.print(f"[yellow]{label}, round {event.round}: {warning}[/yellow]")
            details = [f"{len(event.clients)} clients", *told, *_loads(event), *refused]
            self._update(label, "rounds", event.round, None, ", ".join(details))
        elif isinstance(event, Advanced):
            self._update(label, event.stage, event.done, event.total, "clients")
        else:
            self._progress.update(self._tasks[label], description=f"{label} [green]done[/green]")

    def _update(self, label: str, stage: str, done: int, total: int | None, detail: str = "") -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total, detail="")
        if self._stages.get(label) != stage:
            self._stages[label] = stage
            self._progress.reset(self._tasks[label], total=total, description=f"{label} [dim]{stage}[/dim]")
        self._progress.update(self._tasks[label], completed=done, detail=detail)


def _loads(record: RoundRecord) -> list[str]:
    """The work of each expert in percent, where there are several."""
    loads = record.experts.get("load", [])
    return ["experts " + "/".join(f"{100 * load:.0f}" for load in loads) + " %"] if len(loads) > 1 else []


def score_table(results: Sequence[dict[str, Any]], title: str) -> Table:
    """Accuracy in percent, mean over clients (and seeds)."""
    seeds = len({result["seed"] for result in results})
    table = Table(
        title=f"{title}: accuracy in %, mean over clients" + (f", ± 95% over {seeds} seeds" if seeds > 1 else ""),
        caption="own: each client's test data; global: balanced; a→b: before and after personalising",
    )
    rows = summarise(results)
    new_clients = [part for part in ("unseen", "pooled") if any(row[part] for row in rows)]
    table.add_column("method", no_wrap=True, overflow="fold")
    for column in ("own data", "global", *new_clients, "worst 10%", "spread"):
        table.add_column(column, justify="right", overflow="fold")  # a number may wrap, but is never cut
    for row in rows:
        cells = [_cell(row[part]) for part in ("own", "global", *new_clients)]
        own = row["own"]
        table.add_row(row["title"], *cells, f"{100 * own['worst_decile']:.1f}", f"{100 * own['spread']:.1f}")
    return table


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    interval = "" if cell["interval"] is None else f" ± {100 * cell['interval']:.1f}"
    before = "" if cell["before"] is None else f"[dim]{100 * cell['before']:.1f}→[/dim]"
    return f"{before}{100 * cell['mean']:.1f}{interval}"


def markdown_table(results: Sequence[dict[str, Any]]) -> str:
    """The same numbers for a README: accuracy in %, before → after personalisation."""
    rows = summarise(results)
    parts = ["own", "global", "unseen", *(["pooled"] if any(row["pooled"] for row in rows) else [])]
    names = ["method", "own data", *parts[1:], "worst 10% of own"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [Text.from_markup(_cell(row[part])).plain for part in parts]
        title = row["title"].replace("|", r"\|")  # as in FedMix q(z|y)
        lines.append(f"| {title} | {' | '.join(cells)} | {100 * row['own']['worst_decile']:.1f} |")
    return "\n".join(lines) + "\n"


def html_report(results: Sequence[dict[str, Any]], title: str) -> str:
    return render(list(results), title, summarise(results))


class DownloadProgress:
    """One bar per file."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "DownloadProgress":
        self._progress.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, state: Fetched) -> None:
        if state.file not in self._tasks:
            self._tasks[state.file] = self._progress.add_task(state.file, total=state.expected)
        self._progress.update(self._tasks[state.file], completed=state.received, total=state.expected)


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


def split_facts(split: Split, counts: NDArray[np.int64]) -> str:
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


def data_table(sources: Sequence[SourceStatus], folder: Path | None) -> Table:
    table = Table(title=f"Data sets{f' in {folder}' if folder else ' (set FEDMOE_DATA to the folder that holds them)'}")
    for column in ("name", "what", "train", "test", "classes", "here"):
        table.add_column(column, justify="right" if column in ("train", "test", "classes") else "left")
    for source in sources:
        here = "[green]yes[/green]" if source.present else "no: " + ", ".join(source.missing[:2])
        counts = (f"{source.train_rows:,}", f"{source.test_rows:,}", str(source.num_classes))
        table.add_row(source.name, source.title, *counts, here)
    return table


def explanation(told: Explanation) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("backend", f"[bold]{told.backend}[/bold]: {told.why}")
    table.add_row("model", f"{told.weights:,} weights" + "".join(f"\n  {layer}" for layer in told.layers))
    table.add_row("workers", str(told.workers))
    if told.seconds_per_round is None:
        table.add_row("rounds", "none: clients never talk")
    else:
        total = told.rounds * told.seconds_per_round
        table.add_row(
            "rounds",
            f"{told.rounds} of about {told.seconds_per_round:.2g} s (measured on one): {_duration(total)}, without "
            "validation, personalisation and scores",
        )
    return table


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
