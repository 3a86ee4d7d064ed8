"""Progress in the terminal: one bar per run or download."""

from types import TracebackType

from rich.console import Console
from rich.markup import escape
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

from fedmoe.data.fetch import Progress as Fetched
from fedmoe.engines.steps import RoundRecord
from fedmoe.experiment import Advanced, Ended, Event, Started
from fedmoe.pretraining import Epoch


class RunProgress:
    """One line per run: its stage, how far it is, time left, and what the last round reported."""

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
                self._console.print(f"[yellow]{label}: {escape(note)}[/yellow]")
            if event.finished:
                self._console.print(f"{label}: finished before, showing its results")
            elif event.rounds_of:
                self._console.print(
                    f"{label}: its {event.rounds} rounds are those of {event.rounds_of}, trained once for both; it "
                    "starts from their end"
                )
            elif event.resumed_from == event.rounds > 0:
                self._console.print(f"{label}: its {event.rounds} rounds are done; going on with what follows them")
            elif event.resumed_from:
                self._console.print(f"{label}: resuming after round {event.resumed_from} of {event.rounds}")
            self._update(label, "rounds", event.resumed_from, event.rounds)
        elif isinstance(event, RoundRecord):
            for warning in event.warnings:
                self._console.print(f"[yellow]{label}, round {event.round}: {escape(warning)}[/yellow]")
            self._update(label, "rounds", event.round, None, ", ".join(_details(event)))
        elif isinstance(event, Ended):
            self._console.print(f"{label}: rounds end after {event.round}, since {escape(event.reason)}")
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


def _details(record: RoundRecord) -> list[str]:
    """How many clients, what they reported, each expert's share of the work, and updates that were rejected."""
    reported = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in record.reports.items()]
    loads = record.experts.get("load", [])
    shares = ["experts " + "/".join(f"{100 * load:.0f}" for load in loads) + " %"] if len(loads) > 1 else []
    rejected = [f"[red]{record.rejected} rejected[/red]"] if record.rejected else []
    return [f"{len(record.clients)} clients", *reported, *shares, *rejected]


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


class EpochProgress:
    """One line: how many epochs, and how good the last one was."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._progress = Progress(
            TextColumn("pretrain"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("[dim]{task.fields[detail]}[/dim]"),
            console=console,
        )
        self._task = self._progress.add_task("", total=epochs, detail="")

    def __enter__(self) -> "EpochProgress":
        self._progress.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, epoch: Epoch) -> None:
        detail = f"loss {epoch.loss:.3f}, {epoch.accuracy:.1%} of held-out rows"
        self._progress.update(self._task, completed=epoch.number, detail=detail)
