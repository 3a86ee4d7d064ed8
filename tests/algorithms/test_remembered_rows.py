"""Rows of a calibration: computed once for each cohort and model, anew where either is another."""

import torch

from builders import run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.label_priors import exchanges
from fedmoe.algorithms.label_priors.calibration import CalibrationConfig
from fedmoe.algorithms.label_priors.remembered import CalibrationRows, RememberedRows
from fedmoe.algorithms.prior_mixture.algorithm import PriorMixtureConfig, prior_mixture
from fedmoe.clients.federation import examples

MODEL = {"w": torch.ones(3)}


def rows(size=4):
    return CalibrationRows(
        torch.zeros(1, size, 2), torch.zeros(1, 2), examples(torch.zeros(1, size, 0), torch.zeros(1, size))
    )


class Counted:
    def __init__(self, size=4):
        self.calls, self.size = 0, size

    def __call__(self):
        self.calls += 1
        return rows(self.size)


def test_the_same_model_and_clients_are_computed_once():
    remembered, compute = RememberedRows(), Counted()
    found = [remembered((1, 2), MODEL, compute, anew=n == 0) for n in range(3)]
    assert compute.calls == 1 and found[0] is found[2]


def test_another_model_other_clients_and_a_new_calibration_are_computed():
    remembered, compute = RememberedRows(), Counted()
    remembered((1,), MODEL, compute, anew=True)
    remembered((1,), {"w": torch.ones(3).index_fill(0, torch.tensor([2]), 1.0000001)}, compute, anew=False)
    remembered((2,), MODEL, compute, anew=False)
    remembered((2,), MODEL, compute, anew=True)
    assert compute.calls == 4


def test_memory_is_bounded():
    remembered, compute = RememberedRows(most_bytes=1000), Counted(size=50)
    for client in (1, 2, 3, 1, 3, 3):
        remembered((client,), MODEL, compute, anew=False)
    assert compute.calls == 5, "600 bytes each: one at a time, and the last one twice"


def test_a_run_computes_the_scores_of_each_cohort_once(monkeypatch, tmp_path):
    algorithm = prior_mixture(PriorMixtureConfig(calibration=CalibrationConfig(exchanges=5)), tiny_setup())
    plain, seen = exchanges.calibration_rows, []

    def counted(setup, scores, shared, client, data):
        seen.append(len(data.validation.counts))
        return plain(setup, scores, shared, client, data)

    monkeypatch.setattr(exchanges, "calibration_rows", counted)
    once = run_algorithm(algorithm, tiny_federation(), tmp_path / "once").server
    cohorts = len(seen)
    monkeypatch.setattr(RememberedRows, "__call__", lambda _self, _clients, _sent, compute, *, anew: compute())
    each_time = run_algorithm(algorithm, tiny_federation(), tmp_path / "each").server
    assert len(seen) == cohorts + 5 * cohorts
    assert trees.to_bytes(once) == trees.to_bytes(each_time)
