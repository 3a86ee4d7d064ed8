"""Damage to checkpoints, metrics, config and results of a run: it ends bit-equal, or refuses with a sentence."""

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from damage import DAMAGES, Damage, delete, exchange, flip_a_bit, outcome, put_a_folder, resume, stop_in_the_middle

NAME = "lg_fedavg"  # it has private state, on the server nothing of it
CHECKPOINTS = [f"checkpoints/round-0000000{number}.safetensors" for number in (1, 2)]
STOPPED_FILES = ["config.toml", "metrics.jsonl", ".lock", *CHECKPOINTS]
FINISHED_FILES = ["config.toml", "metrics.jsonl", "results.json", "manifest.json", "finished.json"]


class Runs(NamedTuple):
    """Folders that are copied before they are damaged."""

    expected: dict[str, Any]
    finished: Path
    stopped: Path
    other_finished: Path  # with another seed
    other_stopped: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    home = tmp_path_factory.mktemp("runs")
    made = Runs(resume(NAME, home / "whole"), *(home / name for name in ("whole", "stopped", "other", "other_stopped")))
    stop_in_the_middle(NAME, made.stopped)
    resume(NAME, made.other_finished, seed=1)
    stop_in_the_middle(NAME, made.other_stopped, seed=1)
    return made


def damaged(source: Path, other: Path, name: str, damage: Damage, draw: int, home: Path) -> Path:
    shutil.copytree(source, home)
    damage(home / name, other / name, random.Random(f"{name} {damage.__name__} {draw}"))
    return home


def draws(damage: Damage) -> range:
    """Bits are many, and what one of them does depends on where it is."""
    return range(6 if damage is flip_a_bit else 1)


@pytest.mark.parametrize("name", STOPPED_FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_stopped_run(runs: Runs, name: str, damage: Damage, tmp_path: Path) -> None:
    if name == ".lock" and damage is not delete and damage is not exchange and damage is not put_a_folder:
        return  # it is empty
    for draw in draws(damage):
        home = damaged(runs.stopped, runs.other_stopped, name, damage, draw, tmp_path / str(draw))
        found = outcome(NAME, home, runs.expected)
        if name == CHECKPOINTS[-1] and damage is not delete:
            assert found.startswith(f"as ever: {Path(name).name}") and f"using {Path(CHECKPOINTS[0]).name}" in found
        if name == CHECKPOINTS[0]:
            assert found == "as ever: "  # it is not needed


@pytest.mark.parametrize("name", FINISHED_FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run(runs: Runs, name: str, damage: Damage, tmp_path: Path) -> None:
    for draw in draws(damage):
        home = damaged(runs.finished, runs.other_finished, name, damage, draw, tmp_path / str(draw))
        found = outcome(NAME, home, runs.expected)
        if name.endswith("json") and damage is not delete and damage is not put_a_folder:
            assert "changed after the run ended: clients are scored again" in found


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage is not delete])
def test_both_checkpoints(runs: Runs, damage: Damage, tmp_path: Path) -> None:
    home = damaged(runs.stopped, runs.other_stopped, CHECKPOINTS[0], damage, 0, tmp_path / "run")
    damage(home / CHECKPOINTS[1], runs.other_stopped / CHECKPOINTS[1], random.Random(0))
    found = outcome(NAME, home, runs.expected)
    assert "starting again from round 0" in found and "before it" not in found


def test_metrics_that_a_checkpoint_relies_on(runs: Runs, tmp_path: Path) -> None:
    """The manifest would count less than was sent."""
    shutil.copytree(runs.stopped, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, second, *_ = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first)
    found = outcome(NAME, tmp_path / "run", runs.expected)
    assert f"relies on {len(first + second)} bytes of metrics.jsonl" in found and "round-00000001" in found


def test_the_private_states_of_another_run_are_refused(runs: Runs, tmp_path: Path) -> None:
    name = "clients/private.sqlite"
    home = damaged(runs.stopped, runs.other_stopped, name, exchange, 0, tmp_path / "run")
    assert "private.sqlite belongs to another run" in outcome(NAME, home, runs.expected)


def test_a_whole_folder_of_another_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.other_stopped, tmp_path / "run")
    assert "belongs to another run: seed is 1 there and 0 here" in outcome(NAME, tmp_path / "run", runs.expected)
