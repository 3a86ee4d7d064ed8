"""`reproduce --quick` for every paper: the machinery works, numbers are finite and better than chance."""

import json
import math

import pytest

from fedmoe.evaluation.claims import mean_over_clients
from fedmoe.sweeps.processes import run_cells
from fedmoe.sweeps.reproduction import find

from .test_reproduction import HOME

CHANCE = 0.1  # ten digits


@pytest.mark.slow
def test_every_reproduction_runs_quickly_and_learns(tmp_path):
    cells = [cell for one in find(HOME) for cell in one.cells(tmp_path, [0], quick=True)]
    failed = [event.words for event in run_cells(cells) if event.stage == "failed"]
    assert failed == []
    for cell in cells:
        results = json.loads((cell.directory / "results.json").read_bytes())
        assert all(math.isfinite(score["loss"]) for score in results["scores"]), cell.label
        assert mean_over_clients(results, "own") > 2 * CHANCE, cell.label
