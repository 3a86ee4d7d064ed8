"""One display for a whole sweep: cells done, time left, and what is running now."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedmoe.display.tables import duration
from fedmoe.sweeps.plan import Cell
from fedmoe.sweeps.processes import Progress as CellProgress

ENDED = ("done", "failed")
PERSONAL_SHARE = 0.4  # of a cell's time, as a guess: what comes after its rounds


class SweepProgress:
    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console, self._cells = console, cells
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[detail]}[/dim]"), TimeElapsedColumn(), console=console,
        )  # fmt: skip
        self._overall = self._progress.add_task("[bold]cells[/bold]", total=len(cells), detail="")
        self._tasks: dict[int, TaskID] = {}
        self._shares: dict[int, float] = {}  # how far each running cell is
        self._ended = self._found = 0
        self.failures: dict[str, str] = {}  # why, by folder

    def __enter__(self) -> "SweepProgress":
        self._progress.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, event: CellProgress) -> None:
        label = self._cells[event.cell].label
        if event.stage == "found":
            self._found += 1
        elif event.stage in ENDED:
            self._ended += 1
            self._shares.pop(event.cell, None)
            if (task := self._tasks.pop(event.cell, None)) is not None:
                self._progress.remove_task(task)
            if event.stage == "failed":
                self.failures[str(self._cells[event.cell].directory)] = event.words
                self._console.print(f"[red]{escape(label)} failed:[/red] {escape(event.words)}", soft_wrap=True)
        else:
            self._running(event, label)
        self._progress.update(self._overall, completed=self._found + self._ended, detail=self._time_left())

    def _running(self, event: CellProgress, label: str) -> None:
        if event.cell not in self._tasks:
            self._tasks[event.cell] = self._progress.add_task("", total=None, detail="")
        share = event.done / max(1, event.total)
        in_rounds = event.stage == "rounds"
        self._shares[event.cell] = (1 - PERSONAL_SHARE) * share if in_rounds else 1 - PERSONAL_SHARE * (1 - share)
        words = f"{escape(label)} [dim]{event.stage}[/dim]"
        self._progress.update(
            self._tasks[event.cell], description=words, completed=event.done, total=event.total, detail=event.words
        )

    def _time_left(self) -> str:
        """From the cells of this call alone: those that were found took no time."""
        done = self._ended + sum(self._shares.values())
        elapsed = self._progress.tasks[0].elapsed or 0.0
        if done < 0.02 or elapsed < 2:
            return "time left: not known yet" if len(self._cells) > self._found else ""
        return f"about {duration(elapsed / done * (len(self._cells) - self._found - done))} left"
