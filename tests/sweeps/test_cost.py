"""About what a sweep costs: a method is timed once, and what it needs is counted in examples."""

import json
from pathlib import Path

import pytest

from fedmoe.sweeps import cost
from fedmoe.sweeps.plan import plan

from .test_plan import CONFIG
from .test_reproduction import FOUND, choose


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def timed(monkeypatch):
    asked = []

    def seconds_per_example(config):
        asked.append(config.algorithm.name)
        return 0.01

    monkeypatch.setattr(cost, "_seconds_per_example", seconds_per_example)
    return asked


def seconds(config, tmp_path, grid, changes=()):
    made = cost.estimate(plan(config, grid, [0], tmp_path / "out", changes), cost.Rates(tmp_path / "costs.json"))
    return made.seconds


def test_a_method_is_timed_once_and_more_rounds_or_examples_cost_more(config, tmp_path, timed):
    once = seconds(config, tmp_path, {})
    assert timed == ["fedavg"], "fine-tuned has its rounds, and local training is counted in its examples"
    longer = seconds(config, tmp_path, {}, ["schedule.rounds=300"])
    larger = seconds(config, tmp_path, {"split.train_size": [12, 120]})
    assert longer > once and larger > 2.5 * once and timed == ["fedavg"]
    assert (
        list(json.loads((tmp_path / "costs.json").read_text()))
        and "fedavg, digits, mlp" in (tmp_path / "costs.json").read_text()
    )


def test_experts_count_and_a_damaged_file_is_measured_anew(config, tmp_path, timed):
    (tmp_path / "costs.json").write_text("half")
    two, eight = (
        seconds(config, tmp_path, {}, [f"compare=[{{name='fedmix',num_experts={k}}}]", "schedule.rounds=3000"])
        for k in (2, 8)
    )
    assert eight > 3 * two and timed == ["fedmix"]


def test_a_common_expert_that_is_not_there_yet_can_be_timed_all_the_same(tmp_path):
    (one,) = choose(FOUND, "002", "table6")
    cells = one.cells(tmp_path, [0], quick=True)
    assert cost.estimate(cells, cost.Rates(tmp_path / "costs.json"), 20).seconds > 0


def test_nobody_waits_longer_than_asked_and_what_is_known_is_told(config, tmp_path, timed):
    cells = plan(config, {}, [0], tmp_path / "out")
    impatient = cost.Rates(tmp_path / "costs.json", patience=-1)
    found = cost.estimate(cells, impatient)
    assert found.seconds is None and "not timed yet" in found.why and timed == []
    cost.estimate(cells, cost.Rates(tmp_path / "costs.json"))
    assert cost.estimate(cells, cost.Rates(tmp_path / "costs.json", patience=-1)).seconds > 0


def test_what_cannot_be_timed_says_why(config, tmp_path):
    cells = plan(config, {}, [0], tmp_path / "out", ["split.num_clients=100000"])
    found = cost.estimate(cells, cost.Rates(tmp_path / "costs.json"))
    assert found.seconds is None and "training examples" in found.why
