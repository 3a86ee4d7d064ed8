"""Algorithms with the same rounds train them once."""

from pathlib import Path

import pytest

import fedmoe
from fedmoe.comparison import rounds_key
from fedmoe.config import parse_config
from fedmoe.errors import RunError

SMALL = {
    "split": {"num_clients": 4, "train_size": 30, "validation_size": 20, "test_size": 20, "global_test_size": 50},
    "model": {"hidden": [8]},
    "schedule": {"rounds": 3, "clients_per_round": 2},
    "training": {"personal": {"epochs": 2}},
    "evaluation": {"priors": True},
}


def key(*, priors: bool = False, **algorithm: object) -> object:
    return rounds_key(parse_config({"algorithm": algorithm, "evaluation": {"priors": priors}}))


def test_methods_that_begin_with_fedavg_share_its_rounds_whatever_they_do_afterwards() -> None:
    for priors in (False, True):
        assert key(name="fedavg", priors=priors) == key(name="fine_tuned", priors=priors)
        assert key(name="fedavg", priors=priors) == key(name="knn_per", num_neighbors=3, priors=priors)


def test_another_setting_of_the_rounds_makes_other_rounds() -> None:
    assert key(name="fedavg") != key(name="fine_tuned", validate_every=7)
    assert key(name="fedprox") is None


@pytest.mark.parametrize("order", [("fedavg", "fine_tuned"), ("fine_tuned", "fedavg")])
def test_rounds_are_shared_with_a_method_that_calibrates_after_them(tmp_path: Path, order: tuple[str, str]) -> None:
    compared = fedmoe.compare({**SMALL, "compare": list(order)}, directory=tmp_path / "both")
    second = compared.results[1]
    alone = fedmoe.run({**SMALL, "algorithm": {"name": order[1]}}, directory=tmp_path / "alone").data
    assert second["scores"] == alone["scores"] and second["traffic"] == alone["traffic"]
    first, adopted = ((tmp_path / "both" / f"{name}-seed0" / "metrics.jsonl").read_text() for name in order)
    rounds = [[line for line in text.splitlines() if '"event": "round"' in line] for text in (first, adopted)]
    assert rounds[0] == rounds[1], "they were trained once, down to the seconds that they took"


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    diverges = {"name": "fedavg", "label": "Loud", "server_optimizer": {"name": "sgd", "learning_rate": 1e38}}
    config = {**SMALL, "schedule": {**SMALL["schedule"], "max_abandoned_rounds": 1}, "compare": [diverges, "fedavg"]}
    with pytest.raises(RunError, match=r"Loud-seed0: the last 1 rounds were abandoned.*other runs are finished"):
        fedmoe.compare(config, directory=tmp_path)
    assert fedmoe.load(tmp_path / "fedavg-seed0").summary() and not (tmp_path / "Loud-seed0/finished.json").exists()
    assert "Loud-seed0" in (tmp_path / "report.html").read_text(encoding="utf-8")
