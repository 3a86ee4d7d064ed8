"""Damage to the private states of a run: it ends bit-equal, or refuses with a sentence.

A resume checks that the states which a checkpoint counts on are there; what is in them is checked when they are read.
"""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from damage import (
    PAGE,
    delete,
    empty,
    exchange,
    flip_a_bit,
    outcome,
    put_a_folder,
    resume,
    stop_in_the_middle,
    truncate,
)

STORE = "clients/private.sqlite"


@pytest.fixture(scope="module", params=["lg_fedavg", "fedmix"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """The algorithm; a folder with a finished run, a stopped one, and one of another seed; what they should come to."""
    home = tmp_path_factory.mktemp("runs")
    expected = resume(request.param, home / "finished")
    stop_in_the_middle(request.param, home / "stopped")
    stop_in_the_middle(request.param, home / "other", seed=1)
    return request.param, home, expected


@pytest.mark.parametrize("stage", ["stopped", "finished"])
@pytest.mark.parametrize("damage", [delete, empty, truncate, exchange, put_a_folder])
def test_the_store(runs, damage, stage, tmp_path):
    name, home, expected = runs
    shutil.copytree(home / stage, tmp_path / "run")
    damage(tmp_path / "run" / STORE, home / "other" / STORE, random.Random(0))
    found = outcome(name, tmp_path / "run", expected)
    if damage in (delete, empty):
        assert found.startswith("as ever: round-") and "starting again from round 0" in found
    elif damage in (exchange, put_a_folder):
        assert found.startswith("refused: ") and "private.sqlite" in found


@pytest.mark.parametrize("stage", ["stopped", "finished"])
def test_a_page_of_zeros_wherever_it_is(runs, stage, tmp_path):
    name, home, expected = runs
    content = (home / stage / STORE).read_bytes()
    for page in range(len(content) // PAGE):
        shutil.copytree(home / stage, tmp_path / str(page))
        zeroed = content[: page * PAGE] + bytes(PAGE) + content[(page + 1) * PAGE :]
        (tmp_path / str(page) / STORE).write_bytes(zeroed)
        outcome(name, tmp_path / str(page), expected)


def test_flipped_bits(runs, tmp_path):
    name, home, expected = runs
    for draw in range(12):
        shutil.copytree(home / "stopped", tmp_path / str(draw))
        flip_a_bit(tmp_path / str(draw) / STORE, home / "other" / STORE, random.Random(draw))
        outcome(name, tmp_path / str(draw), expected)


def test_the_states_of_one_client_are_gone(runs, tmp_path):
    """As after a restored backup that is a little too old."""

    name, home, expected = runs
    shutil.copytree(home / "stopped", tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / STORE)) as db:
        (newest,) = db.execute("SELECT MAX(version) FROM state").fetchone()
        db.execute("DELETE FROM state WHERE version = ?", (newest,))
        db.commit()
    found = outcome(name, tmp_path / "run", expected)
    assert "round-00000002.safetensors" in found and "using round-00000001.safetensors before it" in found
