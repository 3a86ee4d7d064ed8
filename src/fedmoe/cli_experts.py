"""The commands around a common expert: `pretrain` makes one, `onboard` finds experts for a new client by it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmoe.cli_deployment import Algorithm, Expert, Gate, RunFolder, open_run
from fedmoe.cli_options import Changes, ConfigPath, console, path, read
from fedmoe.errors import ConfigError


def pretrain_command(
    config: ConfigPath,
    until_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Stop at this share of right answers on held-out public rows. Default: common_expert.until_accuracy "
            "of the config, else after all epochs."
        ),
    ] = None,
    max_epochs: Annotated[int, typer.Option(help="End here, whatever the accuracy.", min=1)] = 100,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Default: common_expert.weights of the config."),
    ] = None,
    changes: Changes = None,
) -> None:
    """Train a common expert on public rows that no client holds (split.public_size), and write its weights.

    Example: fedmoe pretrain configs/fedjets_cifar10.toml --until-accuracy 0.6 --max-epochs 60
    """
    from fedmoe.display.progress import EpochProgress
    from fedmoe.models.start_weights import write_weights
    from fedmoe.pretraining import Epoch, pretrain_events

    chosen = read(config, changes, None)
    common = chosen.common_expert
    home = out or (common.weights if common else None)
    until_accuracy = until_accuracy or (common.until_accuracy if common else None)
    if home is None:
        raise ConfigError("there is no place for the weights: give --out FILE, or common_expert.weights in the config.")
    with EpochProgress(console, max_epochs) as progress:
        for event in pretrain_events(chosen, until_accuracy, max_epochs):
            if isinstance(event, Epoch):
                progress.show(event)
            else:
                made = event
    home.parent.mkdir(parents=True, exist_ok=True)
    write_weights(home, made.weights, made.notes)
    if not made.reached:
        console.print(
            f"[yellow]{until_accuracy:.1%} was not reached in {max_epochs} epochs: the best one, epoch "
            f"{made.epoch.number}, has {made.epoch.accuracy:.1%}.[/yellow]"
        )
    console.print(
        f"{made.epoch.accuracy:.1%} of {made.num_held_out} held-out public rows right after {made.epoch.number} epochs "
        f"on {made.num_rows} public rows, which no client holds: [bold]{escape(str(home))}[/bold]",
        highlight=False,
    )


def onboard_command(
    run: RunFolder,
    data: Annotated[
        Path, typer.Option(parser=path, metavar="FILE", help="Unlabelled rows: .csv, .parquet, or .npz with x.")
    ],
    to: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="A .csv or .parquet file; default: a table here.")
    ] = None,
    expert: Expert = None,
    gate: Gate = None,
    algorithm: Algorithm = None,
) -> None:
    """The right experts for a client that nobody has seen, chosen by its unlabelled rows; and what they answer.

    Each row is answered by its best-scoring expert. Where the router is not confident, by what the run's clients for
    tuning showed, the common expert answers, and that is said.

    Example: fedmoe onboard runs/fedjets_cifar10 --data new_images.npz --to answers.csv
    """
    from fedmoe.deployment.onboarding import onboard
    from fedmoe.deployment.predictions import write_columns
    from fedmoe.display.tables import facts_table, prediction_table

    found = onboard(open_run(run, expert, gate, algorithm), data)
    console.print(facts_table(found.facts()), style="yellow" if found.fell_back else None)
    if to is None:
        console.print(prediction_table(found.columns(), data.name))
    else:
        write_columns(found.columns(), to)
        console.print(f"{len(found.answered_by)} rows: {to}", highlight=False, markup=False)


def add_commands(app: typer.Typer) -> None:
    app.command(name="pretrain")(pretrain_command)
    app.command(name="onboard")(onboard_command)
