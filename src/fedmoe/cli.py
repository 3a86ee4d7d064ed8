"""The command line: parses, shows progress, prints. Everything it does can be done from Python.

Each command imports what it needs when it is called: `--help`, `--version` and `data list` do not wait for torch.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedmoe import cli_deployment, cli_experts, cli_sweeps
from fedmoe.cli_data import audit_app, data_app
from fedmoe.cli_flower import flower_app
from fedmoe.cli_options import Changes, ConfigPath, Directory, Rounds, Workers, console, path, read
from fedmoe.errors import ConfigError, FedmoeError, RunError, Stopped

if TYPE_CHECKING:
    from fedmoe.report.runs import StoredRun

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personalised federated learning with mixtures of experts.\n\n"
    "Example: [bold]fedmoe compare configs/digits.toml[/bold]",
)
app.add_typer(data_app, name="data")
app.add_typer(audit_app, name="audit")
app.add_typer(flower_app, name="flower")


def _print_version(asked: bool) -> None:
    if asked:
        import fedmoe

        console.print(f"fedmoe {fedmoe.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command(name="run")
def run_command(
    config: ConfigPath,
    changes: Changes = None,
    directory: Directory = None,
    rounds: Rounds = None,
    workers: Workers = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write scalars to RUN/tensorboard.")] = False,
) -> None:
    """Train and score one algorithm. Running again resumes, or shows the result of a finished run.

    Examples:
      fedmoe run configs/digits.toml
      fedmoe run configs/digits.toml --rounds 200
      fedmoe run configs/digits.toml --set algorithm.name=fine_tuned --set seed=1 --dir runs/mine
    """
    from fedmoe.display.progress import RunProgress
    from fedmoe.experiment import run_events
    from fedmoe.interrupts import stop_on_signals
    from fedmoe.report.runs import read_run

    chosen = read(config, changes, workers, rounds)
    home = directory or Path("runs") / chosen.name
    with _sink(home, tensorboard) as look, stop_on_signals() as request, RunProgress(console) as progress:
        for event in run_events(chosen, home, command=_command(), should_stop=request):
            progress.show(chosen.algorithm.name, event)
            look()
    _report([read_run(home)], home, chosen.name)


@contextmanager
def _sink(run: Path, wanted: bool) -> Iterator[Callable[[], None]]:
    if not wanted:
        yield lambda: None
        return
    from fedmoe.display.tensorboard import TensorBoardSink

    with TensorBoardSink(run) as sink:
        yield sink.look


@app.command(name="watch")
def watch_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=path, help="The folder of a run or a comparison.")],
    once: Annotated[bool, typer.Option("--once", help="Show where it stands, and end.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write scalars to RUN/tensorboard.")] = False,
) -> None:
    """Rounds, losses and scores of a run while it goes on, from another terminal. Ctrl-C ends the view, not the run.

    Example: fedmoe watch runs/digits
    """
    from fedmoe.display.watching import watch

    with _sink(run, tensorboard) as look:
        watch(run, console, look, once=once)


@app.command(name="compare")
def compare_command(
    config: ConfigPath,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas. Default: the seed of the config.")] = "",
    algorithms: Annotated[
        str, typer.Option(help="Algorithms, separated by commas. Default: `compare` of the config.")
    ] = "",
    changes: Changes = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", parser=path, metavar="FOLDER", help="Default: runs/<name>-comparison."),
    ] = None,
    workers: Workers = None,
) -> None:
    """Train several algorithms on one split and the same seeds; one table, with intervals over seeds.

    A run that fails is named and left out (exit code 2); the others go on.

    Examples:
      fedmoe compare configs/digits.toml
      fedmoe compare configs/digits.toml --seeds 0,1,2,3 --algorithms fedavg,fine_tuned,specialist_mixture
    """
    numbers = cli_sweeps.parse_seeds(seeds)
    from fedmoe.comparison import Failed, compare_events, home_of, members
    from fedmoe.display.progress import RunProgress
    from fedmoe.interrupts import stop_on_signals
    from fedmoe.report.runs import read_run

    if algorithms:
        changes = [*(changes or []), f"compare={[name.strip() for name in algorithms.split(',')]}"]
    chosen = read(config, changes, workers)
    home = directory or Path("runs") / home_of(chosen)
    numbers = numbers or [chosen.seed]
    failed = {}
    with stop_on_signals() as request, RunProgress(console) as progress:
        for member, event in compare_events(chosen, home, numbers, command=_command(), should_stop=request):
            if isinstance(event, Failed):
                failed[member.label] = f"{member.label}: {event.error}"
            else:
                progress.show(member.label, event)
    runs = [read_run(member.directory) for member in members(chosen, home, numbers) if member.label not in failed]
    _report_what_is_left(runs, home, chosen.name, list(failed.values()))


@app.command(name="report")
def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", parser=path, help="Folders of finished runs, or of comparisons.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", parser=path, metavar="FOLDER", help="Where page and table go. Default: the folder, if it is one."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="What the page is called.")] = "",
) -> None:
    """One table and one page of runs that were made one by one, here or on other machines.

    Runs of one name with different seeds are one row, with an interval. A run that is broken, or cannot be compared
    with the others, is named and left out (exit code 2); the others are reported.

    Examples:
      fedmoe report runs/digits-comparison
      fedmoe report runs/fedavg-s0 runs/fedmix-s0 runs/fedavg-s1 runs/fedmix-s1 --dir runs/together
    """
    from fedmoe.report.comparability import read_together, title_of
    from fedmoe.report.runs import find_runs

    if directory is None and len(runs) > 1:
        raise ConfigError("several folders, and none for the report. Name one: --dir runs/together.")
    found = read_together([run for folder in runs for run in (find_runs(folder) or [folder])])
    _report_what_is_left(found.runs, directory or runs[0], title or title_of(found.runs), found.problems)


@app.command(name="explain")
def explain_command(config: ConfigPath, changes: Changes = None, workers: Workers = None) -> None:
    """Which training backend a config takes on this machine, why, and about how long its rounds will last.

    Example: fedmoe explain configs/digits.toml
    """
    from fedmoe.display.tables import explanation_table
    from fedmoe.explain import explain

    console.print(explanation_table(explain(read(config, changes, workers))))


cli_deployment.add_commands(app)
cli_experts.add_commands(app)
cli_sweeps.add_commands(app)


@app.command(name="privacy")
def privacy_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=path, help="The folder of a run, finished or not.")],
) -> None:
    """What each client has spent of its privacy: steps, noise and epsilon, or why nothing is guaranteed.

    Example: fedmoe privacy runs/mine
    """
    from fedmoe.display.privacy import privacy_table
    from fedmoe.privacy_report import privacy_of

    console.print(privacy_table(privacy_of(run)))


def _report_what_is_left(runs: "Sequence[StoredRun]", home: Path, title: str, problems: Sequence[str]) -> None:
    for problem in problems:
        _print_error("RunError", problem)
    if not runs:
        raise RunError("no run is left to report.")
    _report(runs, home, title, problems)
    if problems:
        raise typer.Exit(2)


def _report(runs: "Sequence[StoredRun]", home: Path, title: str, problems: Sequence[str] = ()) -> None:
    from fedmoe.display.tables import class_tables, metric_tables, score_table
    from fedmoe.report.notes import notes
    from fedmoe.report.write import write_report

    results = [run.results for run in runs]
    console.print(score_table(results, title), *metric_tables(results), *class_tables(results))
    for note in notes(results):
        console.print(escape(note), style="yellow" if note.startswith("Warning") else "dim", highlight=False)
    console.print(f"Report: [bold]{escape(str(write_report(runs, home, title, problems)))}[/bold]")


def _print_error(kind: str, words: str) -> None:
    Console(stderr=True).print(f"[red]{kind}:[/red] {escape(words)}", soft_wrap=True)


def _command() -> str:
    return shlex.join(["fedmoe", *sys.argv[1:]])


def main() -> None:
    """Errors that a user can fix are explained, not traced (exit code 2); a stopped run exits with 130."""
    try:
        app()
    except Stopped as stop:
        console.print(f"[yellow]{escape(str(stop))}[/yellow]")
        sys.exit(130)
    except FedmoeError as error:
        _print_error(type(error).__name__, str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
