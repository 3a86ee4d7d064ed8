"""The command line: parses, shows progress, prints. Everything it does can be done from Python."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedmoe import display
from fedmoe.assembly import build_federation
from fedmoe.audit import LABELS_FILE, audit_labels
from fedmoe.comparison import compare_events, members
from fedmoe.config import ExperimentConfig, read_config
from fedmoe.data.download import get
from fedmoe.data.loading import data_folder, list_sources
from fedmoe.errors import ConfigError, FedmoeError
from fedmoe.experiment import Stopped, run_events
from fedmoe.explain import explain
from fedmoe.interrupts import stop_on_signals
from fedmoe.report.comparability import check_together
from fedmoe.report.curves import learning_curve
from fedmoe.report.figures import class_counts, trade_off
from fedmoe.result import Result
from fedmoe.storage.files import write_atomically
from fedmoe.storage.results import read_results

console = Console(stderr=False)
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Personalised federated learning with mixtures of experts.\n\n"
    "Example: [bold]fedmoe compare configs/digits.toml[/bold]",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.\n\nExample: [bold]fedmoe data list[/bold]")
app.add_typer(data_app, name="data")
audit_app = typer.Typer(
    no_args_is_help=True, help="What a run gave away.\n\nExample: [bold]fedmoe audit labels runs/digits[/bold]"
)
app.add_typer(audit_app, name="audit")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see the folder configs/.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")
]
Directory = Annotated[Path | None, typer.Option("--dir", help="Where the run lives. Default: runs/<name>.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Worker processes. Default: one per core.", min=1)]


@app.command(name="run")
def run_command(
    config: ConfigPath, changes: Changes = None, directory: Directory = None, workers: Workers = None
) -> None:
    """Train and score one algorithm. Running again resumes, or shows the result of a finished run.

    Examples:
      fedmoe run configs/digits.toml
      fedmoe run configs/digits.toml --set algorithm.name=fine_tuned --set seed=1 --dir runs/mine
    """
    chosen = _read(config, changes, workers)
    home = directory or Path("runs") / chosen.name
    with stop_on_signals() as request, display.RunProgress(console) as progress:
        for event in run_events(chosen, home, command=_command(), should_stop=request):
            progress.show(chosen.algorithm.name, event)
            if isinstance(event, Result):
                result = event
    _print_results([result.data], home, chosen.name)


@app.command(name="compare")
def compare_command(
    config: ConfigPath,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "",
    algorithms: Annotated[
        str, typer.Option(help="Algorithms, separated by commas. Default: `compare` of the config.")
    ] = "",
    changes: Changes = None,
    directory: Directory = None,
    workers: Workers = None,
) -> None:
    """Train several algorithms on one split and the same seeds; one table, with intervals over seeds.

    Examples:
      fedmoe compare configs/digits.toml
      fedmoe compare configs/digits.toml --seeds 0,1,2,3 --algorithms fedavg,fine_tuned,specialist_mixture
    """
    if algorithms:
        changes = [*(changes or []), f"compare={[name.strip() for name in algorithms.split(',')]}"]
    chosen = _read(config, changes, workers)
    home = directory or Path("runs") / chosen.name
    numbers = _seeds(seeds) or [chosen.seed]
    with stop_on_signals() as request, display.RunProgress(console) as progress:
        for member, event in compare_events(chosen, home, numbers, command=_command(), should_stop=request):
            progress.show(member.label, event)
    _print_results([read_results(member.directory) for member in members(chosen, home, numbers)], home, chosen.name)


@app.command(name="report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where the page, the table and the figures go.")],
    title: Annotated[str, typer.Option(help="What the page is called.")] = "Runs",
) -> None:
    """One table and one page of runs that were made one by one, here or on other machines.

    Runs of one name with different seeds are one row, with an interval.

    Example: fedmoe report runs/fedavg-s0 runs/fedmix-s0 runs/fedavg-s1 runs/fedmix-s1 --dir runs/together
    """
    results = [read_results(run) for run in runs]
    check_together(results, runs)
    _print_results(results, directory, title)


@app.command(name="explain")
def explain_command(config: ConfigPath, changes: Changes = None, workers: Workers = None) -> None:
    """Which way of training a config takes on this machine, why, and about how long its rounds will last.

    Example: fedmoe explain configs/digits.toml
    """
    console.print(display.explanation(explain(_read(config, changes, workers))))


@data_app.command(name="list")
def data_list(
    folder: Annotated[Path | None, typer.Option(help="Where data sets are. Default: $FEDMOE_DATA.")] = None,
) -> None:
    """What can be loaded by name, and whether its files are here.

    Example: fedmoe data list --folder ~/data
    """
    console.print(display.data_table(list_sources(folder), data_folder(folder)))


@data_app.command(name="get")
def data_get(
    name: Annotated[str, typer.Argument(help="A name of `fedmoe data list`.")],
    folder: Annotated[Path | None, typer.Option(help="Where to put it. Default: $FEDMOE_DATA.")] = None,
) -> None:
    """Download a data set from its publisher, with checksum; a broken download goes on where it stopped.

    Example: fedmoe data get cifar10 --folder ~/data
    """
    with display.DownloadProgress(console) as progress:
        home = get(name, folder, progress.show)
    console.print(f"{name} is in [bold]{escape(str(home))}[/bold]")


@data_app.command(name="show")
def data_show(
    config: ConfigPath,
    changes: Changes = None,
    picture: Annotated[Path | None, typer.Option(help="Also write the class counts as an SVG picture.")] = None,
) -> None:
    """Draw the split of a config: class counts per client, sizes, and how much clients overlap.

    Example: fedmoe data show configs/digits.toml --picture split.svg
    """
    built = build_federation(_read(config, changes, None))
    if built.split is None or built.class_counts is None:
        raise ConfigError("this config has no split of one labelled data set to draw.")
    console.print(display.split_table(built.class_counts, built.class_names, built.split.num_clients))
    console.print(display.split_facts(built.split, built.class_counts))
    if picture:
        write_atomically(picture, class_counts(built.class_counts.tolist(), list(built.class_names)).encode())
        console.print(f"Picture: [bold]{escape(str(picture))}[/bold]")


@audit_app.command(name="labels")
def audit_labels_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    clients: Annotated[int, typer.Option(help="How many clients to look at, drawn by the seed.", min=1)] = 100,
) -> None:
    """How much of each client's label distribution the server could read off its updates.

    Runs one round again, from the start and from the newest checkpoint, and attacks what arrives (Reisser et al. 2021,
    Appendix C). The run stays as it is.

    Example: fedmoe audit labels runs/digits
    """
    console.print(display.audit_table(audit_labels(run, clients)))
    console.print(f"Every client: [bold]{escape(str(run / LABELS_FILE))}[/bold]")


def _read(config: Path, changes: list[str] | None, workers: int | None) -> ExperimentConfig:
    extra = [f"engine.workers={workers}"] if workers else []
    return read_config(config, [*(changes or []), *extra])


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers such as 0,1,2", param_hint="--seeds") from None


def _print_results(results: list[dict[str, object]], home: Path, title: str) -> None:
    console.print(display.score_table(results, title))
    pages = {
        "report.html": display.html_report(results, title),
        "table.md": display.markdown_table(results),
        "trade_off.svg": trade_off(results),
        "accuracy_against_rounds.svg": learning_curve(results, "own", "round"),
        "accuracy_against_bytes.svg": learning_curve(results, "own", "bytes"),
        "newcomer_against_rounds.svg": learning_curve(results, "pooled", "round"),
        "newcomer_against_bytes.svg": learning_curve(results, "pooled", "bytes"),
    }
    home.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        if page:  # a curve needs runs that were looked at on the way
            write_atomically(home / name, page.encode())
    console.print(f"Report: [bold]{escape(str(home / 'report.html'))}[/bold]")


def _command() -> str:
    return shlex.join(["fedmoe", *sys.argv[1:]])


def main() -> None:
    """Errors that a user can mend are explained, not traced (exit code 2); a stopped run exits with 130."""
    try:
        app()
    except Stopped as stop:
        console.print(f"[yellow]{escape(str(stop))}[/yellow]")
        sys.exit(130)
    except FedmoeError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
