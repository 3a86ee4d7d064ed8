"""Experts in a run's output: the metrics, the results, the page, the terminal."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from builders import make_expert, make_gate, tiny_config, tiny_federation
from contract.probes import PROBES
from fedmoe.aggregation.expert_observation import Observation
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config import ExperimentConfig
from fedmoe.display.progress import RunProgress
from fedmoe.errors import Stopped
from fedmoe.experiment import Event, run_events
from fedmoe.report.page import render
from fedmoe.report.runs import read_run
from fedmoe.result import Result


def observed(load: list[float]) -> Any:
    """The probe with a mixture that looks like `load` in every round."""
    entry = PROBES["pruned_experts"]

    def factory(config: Any, setup: Any) -> Any:
        algorithm = entry.factory(config, setup)
        observed = Observation(torch.tensor(load), 0.5, torch.full((3,), math.nan), torch.eye(3))
        return algorithm._replace(round=(algorithm.round[0]._replace(observe=lambda *_: observed),))

    return entry._replace(factory=factory)


def run(config: ExperimentConfig, directory: Path, **options: Any) -> list[Event]:
    return list(
        run_events(config, directory, federation=tiny_federation(), expert=make_expert, gate=make_gate, **options)
    )


@pytest.fixture
def collapsed(monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.setitem(CATALOG, "pruned_experts", observed([0.0, 1.0, 0.0]))
    return tiny_config("pruned_experts", rounds=7)


def test_every_round_of_the_metrics_tells_of_the_experts_and_results_keep_the_last_map(collapsed, tmp_path):
    *_, result = run(collapsed, tmp_path)
    assert isinstance(result, Result)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    eye = {"of": "label", "shares": torch.eye(3).tolist()}
    assert [event["experts"]["assignment"] for event in rounds] == [eye] * 7
    assert [len(event["warnings"]) for event in rounds] == [0, 0, 0, 0, 1, 0, 0]
    assert result.data["assignment"] == eye
    assert result.data["history"][6]["experts"] == {"load": [0, 1, 0], "usage_entropy": 0.5, "divergence": [None] * 3}
    assert result.data["warnings"] == [f"round 5: {rounds[4]['warnings'][0]}"]


def test_a_resumed_run_warns_in_the_same_round(collapsed, tmp_path):
    with pytest.raises(Stopped):
        stops = iter([False] * 4 + [True] * 9)
        run(collapsed, tmp_path, should_stop=lambda: next(stops))
    *_, result = run(collapsed, tmp_path)
    assert [words.split(":")[0] for words in result.data["warnings"]] == ["round 5"]


def test_the_terminal_shows_loads_and_warnings(collapsed, tmp_path):
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with RunProgress(console) as progress:
        for event in run(collapsed, tmp_path):
            progress.show("probe", event)
            progress._progress.refresh()
    shown = console.file.getvalue()
    assert "experts 0/100/0 %" in shown and "round 5: expert 1 did 100% of the work" in shown


def test_the_page_shows_experts_and_warnings(collapsed, tmp_path):
    *_, result = run(collapsed, tmp_path)
    page = render([read_run(result.directory)], "Probe")
    assert "Pruned experts: who does the work" in page and "Pruned experts: what each expert is for" in page
    assert "seed 0, round 5: expert 1 did 100% of the work" in page


def test_fedavg_tells_how_far_apart_clients_pull_where_it_is_asked_to(tmp_path):
    config = tiny_config("fedavg", rounds=2)
    asked = config.model_copy(update={"algorithm": type(config.algorithm)(name="fedavg", divergence=True)})
    plain, watched = (run(one, tmp_path / name)[-1].data["history"] for one, name in ((config, "a"), (asked, "b")))
    assert all(event["experts"] == {} for event in plain)
    assert all(event["experts"]["load"] == [1.0] and 0 < event["experts"]["divergence"][0] < 2 for event in watched)
