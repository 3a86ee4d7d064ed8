"""`reproduce --quick` for every paper: the machinery works, numbers are finite and better than chance."""

import json
import math

import pytest

from fedmoe.evaluation.claims import mean_over_clients
from fedmoe.sweeps.preparation import pretrain_missing
from fedmoe.sweeps.processes import run_cells
from fedmoe.sweeps.reproduction import find

from .test_reproduction import HOME

CHANCE = 0.1  # ten digits


@pytest.mark.slow
def test_every_reproduction_runs_quickly_and_learns(tmp_path):
    planned = {}
    for one in find(HOME):
        cells = one.cells(tmp_path, [0], quick=True)
        planned |= {cell.directory: cell for cell in cells}
        if epochs := one.epochs(quick=True):
            list(pretrain_missing(cells, epochs))
    cells = list(planned.values())
    failed = [event.words for event in run_cells(cells) if event.stage == "failed"]
    assert failed == []
    for cell in cells:
        results = json.loads((cell.directory / "results.json").read_bytes())
        assert all(math.isfinite(score["loss"]) for score in results["scores"]), cell.label
        if results.get("task") == "regression":
            assert all(score["metrics"]["r2"] > 0 for score in results["scores"] if score["data"] == "own"), cell.label
        else:
            # Not by far everywhere: where one of five clients with two labels each takes part, FedAvg has 0.2.
            assert mean_over_clients(results, "own") > CHANCE, cell.label
