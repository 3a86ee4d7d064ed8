"""The commands `fedmoe sweep` and `fedmoe reproduce`: many runs, side by side, resumable."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmoe.cli_options import Changes, ConfigPath, console, path
from fedmoe.errors import ConfigError, RunError

if TYPE_CHECKING:
    from fedmoe.report.sweep import PaperPart
    from fedmoe.sweeps.plan import Cell
    from fedmoe.sweeps.reproduction import Reproduction

TIMING_SECONDS = 60.0  # of one call of `reproduce list`

Processes = Annotated[int | None, typer.Option("--processes", help="Runs side by side. Default: one per core.", min=1)]
Home = Annotated[
    Path, typer.Option("--dir", parser=path, metavar="FOLDER", help="Where the runs live. Default: runs/reproduce.")
]


def add_commands(app: typer.Typer) -> None:
    app.command(name="sweep")(sweep_command)
    app.command(name="reproduce")(reproduce_command)


def sweep_command(
    config: ConfigPath,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=A,B,C", help="Values of one setting; repeatable.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    changes: Changes = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", parser=path, metavar="FOLDER", help="Default: runs/<name>-sweep.")
    ] = None,
    processes: Processes = None,
) -> None:
    """Every combination of settings × `compare` of the config × seeds, side by side; one page at the end.

    Stopped or killed, it goes on where it was when the same command is run again.

    Example: fedmoe sweep configs/digits.toml --grid split.share=0.3,0.6,0.9 --seeds 0,1,2,3
    """
    numbers = parse_seeds(seeds)
    from fedmoe.config import read_config
    from fedmoe.sweeps.plan import parse_grid, plan

    home = directory or Path("runs") / f"{read_config(config, changes or ()).name}-sweep"
    cells = plan(config, parse_grid(grid or []), numbers, home, changes or ())
    problems = _run(cells, processes)
    _write(cells, home, home.name, problems)


def reproduce_command(
    paper: Annotated[str, typer.Argument(metavar="PAPER|list|all", help="000 … 004, `all`, or `list`.")] = "list",
    figure: Annotated[
        str | None, typer.Argument(help="A table or figure of the paper; of `list` a paper. Default: all of them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few rounds on small data: does it work?")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds: 0, 1, … Default: as the file says.", min=0)] = None,
    directory: Home = Path("runs/reproduce"),
    processes: Processes = None,
) -> None:
    """The tables and figures of the papers: our numbers beside theirs, and whether their claims hold.

    Examples:
      fedmoe reproduce                                     what there is, what it costs here, what has been run
      fedmoe reproduce list 002                            the same of one paper
      fedmoe reproduce 000 table1-fashion-mnist --seeds 2
      fedmoe reproduce all --quick
    """
    from fedmoe.sweeps.reproduction import choose, find

    if paper == "list":
        _list(choose(find(), figure, None), directory)
        return
    chosen = choose(find(), None if paper == "all" else paper, figure)
    if seeds == 0:
        raise ConfigError("--seeds 0 runs nothing. Name at least one; four decide a claim.")
    planned = []
    for one in chosen:
        numbers = range(seeds) if seeds is not None else [0] if quick else one.seeds
        cells = one.cells(directory, numbers, quick=quick)
        if epochs := one.epochs(quick=quick):
            from fedmoe.sweeps.preparation import pretrain_missing

            for words in pretrain_missing(cells, epochs):
                console.print(f"{one.name}: {words}", highlight=False)
        planned.append((one, cells))
    by_folder = {cell.directory: cell for _, cells in planned for cell in cells}  # figures may share runs
    failures = _run(list(by_folder.values()), processes)
    for one, cells in planned:
        if one.audit:
            from fedmoe.sweeps.preparation import audit_missing

            audit_missing(cells)
    problems = [words for one, cells in planned for words in _report(one, cells, failures, directory, quick)]
    if problems:
        raise RunError(f"{len(problems)} runs could not be made; they are named above and in the reports.")


def _report(
    one: "Reproduction", cells: "Sequence[Cell]", failures: dict[str, str], directory: Path, quick: bool
) -> list[str]:
    from fedmoe.sweeps.outcome import gather
    from fedmoe.sweeps.reproduction import alone, beside

    points, problems = gather(cells, failures)
    console.rule(f"{one.name}: {escape(one.title)}")
    if not points:
        console.print(escape("; ".join(problems)), style="red")
    else:
        title = one.title + (" (quick: small data, not the paper's)" if quick else "")
        _show(points, one.folder(directory, quick=quick), title, problems, alone(one) if quick else beside(one, points))
    return problems


def _run(cells: "Sequence[Cell]", processes: int | None) -> dict[str, str]:
    from fedmoe.display.sweeps import SweepProgress
    from fedmoe.interrupts import stop_on_signals
    from fedmoe.sweeps.processes import run_cells

    command = shlex.join(["fedmoe", *sys.argv[1:]])
    with stop_on_signals() as request, SweepProgress(console, cells) as progress:
        for event in run_cells(cells, processes=processes, command=command, should_stop=request):
            progress.show(event)
    return progress.failures


def _write(cells: "Sequence[Cell]", home: Path, title: str, failures: dict[str, str]) -> None:
    from fedmoe.sweeps.outcome import gather

    points, problems = gather(cells, failures)
    _show(points, home, title, problems, None)
    if problems:
        raise RunError(f"{len(problems)} of {len(cells)} runs are not there: {' '.join(problems[:5])}")


def _show(points: list, home: Path, title: str, problems: list[str], paper: "PaperPart | None") -> None:  # type: ignore[type-arg]
    from fedmoe.display.tables import audit_table, grid_tables
    from fedmoe.report.grid import words_of
    from fedmoe.report.sweep import write_grid

    for problem in problems:
        console.print(escape(problem), style="red", highlight=False)
    written = write_grid(points, home, title, problems, paper)
    console.print(*grid_tables(points, paper))
    for point in points:
        for run in (run for run in point.runs if run.labels_audit):
            console.print(escape(words_of(point.point)), audit_table(dict(run.labels_audit)))
    console.print(f"Report: [bold]{escape(str(written))}[/bold]")


def _list(found: "Sequence[Reproduction]", directory: Path) -> None:
    from fedmoe.display.tables import reproduction_table
    from fedmoe.sweeps.cost import Rates, estimate
    from fedmoe.sweeps.plan import is_finished

    rows, rates = [], Rates(directory / "costs.json", TIMING_SECONDS)
    reasons: dict[str, list[str]] = {}
    with console.status("") as status:
        for number, one in enumerate(found, 1):
            status.update(
                f"timing a few rounds of every method, once on this machine: {one.name}, {number} of {len(found)}"
            )
            cells = one.cells(directory, one.seeds)
            cost = estimate(cells, rates, one.pretrain_epochs)
            rows.append((one, cost, sum(map(is_finished, cells)), len(cells)))
            reasons.setdefault(cost.why, []).append(one.name)
    console.print(reproduction_table(rows))
    for why, names in reasons.items():
        if why:
            console.print(f"{', '.join(names)}: {escape(why)}", style="dim", highlight=False)


def parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds {text!r} is no list of whole numbers. Write it as --seeds 0,1,2.") from None
