"""Runs as a user makes them: what belongs to a run, what it leaves behind, and when it gives up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedmoe
from builders import OPTED_OUT, make_expert, make_gate, read_private, tiny_config, tiny_federation
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.config_sections import EvaluationConfig
from fedmoe.errors import RunError
from fedmoe.result import Result


def run(directory: Path, name: str = "fedavg", expert: Any = make_expert, **options: Any) -> Result:
    evaluation = options.pop("evaluation", EvaluationConfig())
    config = tiny_config(name, **options).model_copy(update={"evaluation": evaluation})
    return fedmoe.run(config, federation=tiny_federation(), expert=expert, gate=make_gate, directory=directory)


def manifest_of(result: Result) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((result.directory / "manifest.json").read_text())
    return manifest


def with_activation(activation: type[nn.Module]) -> Any:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5), activation(), nn.Linear(5, 3))


def test_a_changed_module_is_another_run(tmp_path: Path) -> None:
    """The weights have the same shapes, so nothing else would tell."""
    run(tmp_path, expert=with_activation(nn.ReLU))
    run(tmp_path, expert=with_activation(nn.ReLU))
    with pytest.raises(RunError, match=r"belongs to another run: recorded\.modules\.expert"):
        run(tmp_path, expert=with_activation(nn.Tanh))


def backbone(value: float) -> Any:
    def build() -> nn.Module:
        frozen = nn.Linear(4, 6).requires_grad_(False)
        frozen.weight.fill_(value)
        return nn.Sequential(nn.Flatten(), frozen, nn.ReLU(), nn.Linear(6, 3))

    return build


@pytest.mark.parametrize("name", ["fedavg", "specialist_mixture", "fedmix"])
def test_frozen_weights_travel_once_to_each_client_and_never_back(name: str, tmp_path: Path) -> None:
    manifest = manifest_of(run(tmp_path, name, backbone(0.1)))
    everyone = tiny_federation().num_clients + tiny_federation().num_unseen
    received = manifest["received_by_clients"].pop("frozen weights")
    assert received["expert/1.weight"]["times"] == received["expert/1.bias"]["times"] == everyone
    others = [*manifest["received_by_clients"].values(), *manifest["sent_by_clients"].values()]
    named = {tensor for rows in others for tensor in rows}
    assert any("3.weight" in tensor for tensor in named)
    assert not any("1.weight" in tensor or "1.bias" in tensor for tensor in named)


def test_other_frozen_weights_are_another_run(tmp_path: Path) -> None:
    run(tmp_path, expert=backbone(0.1))
    with pytest.raises(RunError, match=r"recorded\.frozen_weights\.expert"):
        run(tmp_path, expert=backbone(0.2))


def test_a_run_from_python_leaves_a_report(tmp_path: Path) -> None:
    page = (run(tmp_path).directory / "report.html").read_text()
    assert "FedAvg" in page


def test_a_run_whose_every_update_is_rejected_stops_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the last 3 rounds were abandoned.*max_update_norm"):
        run(tmp_path, rounds=9, max_update_norm=1e-9, max_abandoned_rounds=3)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event["round"] for event in events] == [1, 2, 3]
    assert all("abandoned: 0 of 3 replies" in event["warnings"][0] for event in events)


def test_fewer_abandoned_rounds_are_counted_in_the_results(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=2, max_update_norm=1e-9)
    assert result.data["abandoned_rounds"] == 2 and result.data["rejected"] == 6
    assert [words.split(":")[0] for words in result.data["warnings"]] == ["round 1", "round 2"]


@pytest.mark.parametrize(("asked", "without"), [("all", []), ("opted_in", [OPTED_OUT, 5]), ("none", list(range(7)))])
def test_scores_are_sent_by_those_who_are_asked_and_counted_apart(
    asked: Any, without: list[int], tmp_path: Path
) -> None:
    result = run(tmp_path, "fine_tuned", evaluation=EvaluationConfig(clients_asked=asked))
    expected = {str(client) for client in range(7) if client not in without}
    manifest = manifest_of(result)
    assert set(manifest["score_messages_of_client"]) == expected == {str(score.client) for score in result.scores}
    assert not any("accuracy" in rows for rows in manifest["sent_by_clients"].values())
    assert bool(result.data["traffic"]["score_bytes"]) == bool(expected)
    kept = {client for kind, client, _ in read_private(tmp_path / "clients" / "private.sqlite") if kind == "scores"}
    assert kept == set(without)


def test_where_not_everyone_is_asked_the_folder_counts_opted_in_records_alone(tmp_path: Path) -> None:
    result = run(tmp_path, evaluation=EvaluationConfig(clients_asked="opted_in"))
    assert result.data["class_counts"][OPTED_OUT] == [0, 0, 0] != result.data["class_counts"][0]


def test_where_not_everyone_is_asked_the_folder_has_no_digest_of_opted_out_records(tmp_path: Path) -> None:
    """A digest of a few records could be guessed by trying."""

    def recorded(value: float, asked: Any) -> str:
        x, y = torch.ones(30, 4).cumsum(0), torch.arange(30) % 3
        private = {"open": (x, y), "private": (x.index_fill(0, torch.tensor([4]), value), y)}
        config = {
            "schedule": {"rounds": 1, "clients_per_round": "all"},
            "algorithm": {"name": "fedavg"},
            "evaluation": {"clients_asked": asked},
        }
        federation = fedmoe.federation_from_clients(private, opted_out={"private": True})
        options = {"federation": federation, "expert": make_expert, "gate": make_gate}
        result = fedmoe.run(config, directory=tmp_path / f"{value}{asked}", **options)
        digest = result.data["split_digest"]
        assert digest in (result.directory / "config.toml").read_text()
        return str(digest)

    assert recorded(1.0, "opted_in") == recorded(2.0, "opted_in")
    assert recorded(1.0, "all") != recorded(2.0, "all")


def test_names_of_clients_stand_in_what_a_run_leaves(tmp_path: Path) -> None:
    clients = {name: (torch.randn(30, 4), torch.arange(30) % 3) for name in ("north", "south")}
    federation = fedmoe.federation_from_clients(clients)
    config = {"schedule": {"rounds": 1, "clients_per_round": "all"}, "algorithm": {"name": "fedavg"}}
    result = fedmoe.run(config, federation=federation, expert=make_expert, gate=make_gate, directory=tmp_path)
    names = {"0": "north", "1": "south"}
    assert json.loads((tmp_path / "results.json").read_text())["client_names"] == names
    assert manifest_of(result)["client_names"] == names
    assert '"name": "south"' in (tmp_path / "metrics.jsonl").read_text()
    assert "south" in (tmp_path / "report.html").read_text()
    assert [sum(counts) for counts in result.data["class_counts"]] == [18, 18]


def my_algorithm(setup: AlgorithmSetup) -> Algorithm:
    return fedavg(FedAvgConfig(validate_every=1), setup)


def test_an_algorithm_of_the_users_own_runs(tmp_path: Path) -> None:
    config = tiny_config()
    options = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate, "algorithm": my_algorithm}
    result = fedmoe.run(config, directory=tmp_path, **options)
    assert result.data["title"] == "my_algorithm"
    assert fedmoe.build(config, **options).algorithm.validation.every == 1
