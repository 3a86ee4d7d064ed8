"""What the commands share: their console, their arguments and options, and how they read a config."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedmoe.errors import ConfigError
from fedmoe.paths import expanded

if TYPE_CHECKING:
    from fedmoe.config import ExperimentConfig

console = Console(stderr=False)


# Typer shows the names of these functions in its help: what to write there.
def path(text: str) -> Path:
    return expanded(text)


def toml_file(text: str) -> Path:
    """A mistyped name is said at once, before anything slow is imported."""
    config = expanded(text)
    if not config.is_file():
        raise ConfigError(f"the config {config} cannot be read: there is no such file. Name an existing TOML file.")
    return config


ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", parser=toml_file, help="A TOML file; see the folder configs/.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")
]
Directory = Annotated[Path | None, typer.Option("--dir", parser=path, metavar="FOLDER", help="Default: runs/<name>.")]
DataFolder = Annotated[
    Path | None,
    typer.Option("--folder", parser=path, metavar="FOLDER", help="Where data sets are. Default: $FEDMOE_DATA."),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", help="As schedule.rounds; a run with fewer rounds goes on, also a finished one.", min=1),
]
Workers = Annotated[int | None, typer.Option("--workers", help="Worker processes. Default: one per core.", min=1)]


def read(config: Path, changes: list[str] | None, workers: int | None, rounds: int | None = None) -> "ExperimentConfig":
    from fedmoe.config import read_config

    extra = {"engine.workers": workers, "schedule.rounds": rounds}
    return read_config(config, [*(changes or []), *(f"{key}={value}" for key, value in extra.items() if value)])
