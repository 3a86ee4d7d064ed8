"""The commands below `fedmoe data` and `fedmoe audit`: what goes into a run, and what could be read off one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmoe.cli_options import Changes, ConfigPath, DataFolder, console, path, read
from fedmoe.errors import ConfigError, RunError

data_app = typer.Typer(no_args_is_help=True, help="Data sets.\n\nExample: [bold]fedmoe data list[/bold]")
audit_app = typer.Typer(
    no_args_is_help=True, help="What a run reveals.\n\nExample: [bold]fedmoe audit labels runs/digits[/bold]"
)


@data_app.command(name="list")
def data_list(folder: DataFolder = None) -> None:
    """What can be loaded by name, and whether its files are here.

    Example: fedmoe data list --folder ~/data
    """
    from fedmoe.data.available import data_folder, list_sources
    from fedmoe.display.tables import data_table

    console.print(data_table(list_sources(folder), data_folder(folder)))


@data_app.command(name="get")
def data_get(
    name: Annotated[str, typer.Argument(help="A name of `fedmoe data list`.")], folder: DataFolder = None
) -> None:
    """Download a data set from its publisher, with checksum; a broken download goes on where it stopped.

    Example: fedmoe data get cifar10 --folder ~/data
    """
    from fedmoe.data.download import get
    from fedmoe.display.progress import DownloadProgress

    with DownloadProgress(console) as progress:
        home = get(name, folder, progress.show)
    console.print(f"{name} is in [bold]{escape(str(home))}[/bold]")


@data_app.command(name="show")
def data_show(
    config: ConfigPath,
    changes: Changes = None,
    picture: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Also draw the class counts, as a page (.html)."),
    ] = None,
) -> None:
    """Draw the split of a config: class counts per client, sizes, and how much clients overlap.

    Example: fedmoe data show configs/digits.toml --picture split.html
    """
    from fedmoe.display.tables import split_facts, split_table
    from fedmoe.federations import build_federation
    from fedmoe.report.page import render_split
    from fedmoe.storage.files import write_atomically

    chosen = read(config, changes, None)
    built = build_federation(chosen)
    if built.split is None or built.class_counts is None:
        raise ConfigError("this config has no split of one labelled data set to draw.")
    console.print(split_table(built.class_counts, built.federation.class_names, built.split.num_clients))
    console.print(split_facts(built.split, built.class_counts))
    if picture:
        drawn = render_split(built.class_counts.tolist(), built.federation.class_names, chosen.seed, chosen.name)
        write_atomically(picture, drawn.encode(errors="replace"))
        console.print(f"Picture: [bold]{escape(str(picture))}[/bold]")


@audit_app.command(name="labels")
def audit_labels_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=path, help="The folder of a run.")],
    clients: Annotated[int, typer.Option(help="How many clients to audit, drawn by the seed.", min=1)] = 100,
) -> None:
    """How much of each client's label distribution the server could read off its updates.

    Runs one round again, from the start and from the newest checkpoint, and attacks what arrives (Reisser et al. 2021,
    Appendix C). The run stays as it is.

    Example: fedmoe audit labels runs/digits
    """
    _require_one_run(run)
    from fedmoe.audit import audit_labels
    from fedmoe.display.tables import audit_table
    from fedmoe.storage.rundir import RunDirectory

    found = audit_labels(run, clients)
    for note in found.get("notes", ()):
        console.print(escape(note), style="yellow", highlight=False)
    console.print(audit_table(found))
    console.print(f"Every client: [bold]{escape(str(RunDirectory(run).labels_audit))}[/bold]")


@audit_app.command(name="canary")
def audit_canary_command(
    config: ConfigPath,
    changes: Changes = None,
    canaries: Annotated[int, typer.Option(help="How many records are put in or left out by a coin.", min=2)] = 1000,
) -> None:
    """What an attack can prove of epsilon, beside what the ledger says. Fails if the two contradict each other.

    Trains the config once with canaries, from which the server guesses who was in (Steinke et al. 2023).

    Example: fedmoe audit canary configs/digits.toml --set privacy.target_epsilon=4 --set privacy.sampling_rate=0.1
    """
    from fedmoe.canary_audit import audit_canaries
    from fedmoe.display.privacy import canary_table

    console.print(canary_table(audit_canaries(read(config, changes, None), canaries)))


def _require_one_run(folder: Path) -> None:
    from fedmoe.report.runs import find_runs

    runs = find_runs(folder)
    if folder not in runs and runs:
        raise RunError(
            f"{folder} is not one run but holds {len(runs)}: {', '.join(map(str, runs[:20]))}"
            f"{', …' if len(runs) > 20 else ''}. Name one of them."
        )
