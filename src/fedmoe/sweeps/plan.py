"""What a sweep runs: every combination of settings × algorithm × seed is a cell, a run in a folder of its own."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe.comparison import NOT_IN_ROUNDS, members
from fedmoe.config import ExperimentConfig, read_config
from fedmoe.errors import ConfigError, RunError
from fedmoe.report.grid import Point, words_of
from fedmoe.storage.finished import changed_since_finished
from fedmoe.storage.results import read_results
from fedmoe.storage.rundir import RunDirectory


class Cell(NamedTuple):
    """One run; `point` says where in the grid it stands."""

    label: str
    point: Point
    config: ExperimentConfig
    directory: Path


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """
    >>> parse_grid(["split.share=0.6,1.0", "algorithm.num_experts=2"])
    {'split.share': ['0.6', '1.0'], 'algorithm.num_experts': ['2']}
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        found = [value.strip() for value in _split(values) if value.strip()]
        if not (separator and key.strip() and found):
            raise ConfigError(f"--grid {text!r} names no values. Write it as --grid split.share=0.3,0.6.")
        if key.strip() in grid:
            raise ConfigError(f"--grid names {key.strip()!r} twice. Write all of its values into one.")
        grid[key.strip()] = found
    return grid


def _split(values: str) -> list[str]:
    """At commas, but not inside brackets: channels may be [6,36],[6,75].

    >>> _split("[6,36],{a=[1,2],b=3}")
    ['[6,36]', '{a=[1,2],b=3}']
    """
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def plan(
    config: Path, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int], directory: Path, changes: Sequence[str] = ()
) -> list[Cell]:
    """The cells of a grid over the config, in its order. A setting that is refused is refused before anything runs."""
    if not seeds:
        raise ConfigError("no seeds, so there is nothing to run. Name some: --seeds 0,1,2,3.")
    cells = []
    for values in itertools.product(*grid.values()):
        point = tuple(zip(grid, values, strict=True))
        chosen = read_config(config, [*changes, *(f"{key}={as_toml(value)}" for key, value in point)])
        folder = directory / folder_of(point) if point else directory
        for member in members(chosen, folder, seeds):
            label = f"{folder_of(point)}/{member.label}" if point else member.label
            named = member.config.model_copy(update={"name": f"{chosen.name}-sweep/{label}"})
            cells.append(Cell(label, point, named, member.directory))
    _require_differences(cells)
    return cells


def _require_differences(cells: Sequence[Cell]) -> None:
    """A setting that no run reads, such as one of [algorithm] where `compare` has its own, would make equal points."""
    runs: dict[str, tuple[Point, list[Any]]] = {}
    for cell in cells:
        _, at_point = runs.setdefault(folder_of(cell.point), (cell.point, []))
        at_point.append(cell.config.model_dump(mode="json", exclude={"name", "compare"}))
    points = list(runs.values())
    for at, (point, asked) in enumerate(points):
        if (same := next((other for other, made in points[:at] if made == asked), None)) is not None:
            raise ConfigError(
                f"{words_of(point)} and {words_of(same)} are the same runs: nothing that is compared reads "
                f"{' or '.join(key for key, _ in point)}. Set it inside `compare`, or choose another setting."
            )


def as_toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def folder_of(point: Point) -> str:
    """
    >>> folder_of((("split.share", 0.6), ("opt_out.client_fraction", 0.9)))
    'share=0.6+client_fraction=0.9'
    """
    return "+".join(f"{short(key)}={re.sub(r'[^A-Za-z0-9_.-]+', '_', str(value))}" for key, value in point)


def short(key: str) -> str:
    return key.rpartition(".")[2]


def is_finished(cell: Cell) -> bool:
    """Whether the folder holds this very run, at its end and as it left it; what is odd is for the run to say."""
    try:
        recorded = RunDirectory(cell.directory).read_config()["recorded"]["run_id"]
        if changed_since_finished(RunDirectory(cell.directory), recorded) != []:
            return False
        stored = read_results(cell.directory)["config"]
    except (FileNotFoundError, RunError):
        return False
    asked = cell.config.model_dump(mode="json")
    return all(stored.get(key) == asked.get(key) for key in {*stored, *asked} if key not in NOT_IN_ROUNDS)
