"""An attack on one's own privacy proves what it can, and contradicts a ledger that lies."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedmoe
from fedmoe.canary_audit import audit_canaries, draw_canaries, with_canaries
from fedmoe.cli import app
from fedmoe.config import parse_config
from fedmoe.errors import ConfigError, RunError
from fedmoe.evaluation.canary_bound import best_bound, largest_bound, lower_bound, p_value
from fedmoe.private_steps import PrivateSteps
from fedmoe.testing.federation import tiny_federation

TABLE = {
    "data": {"name": "generated"},
    "split": {"num_clients": 4, "train_size": 20, "validation_size": 2, "test_size": 5, "global_test_size": 10},
    "model": {"name": "mlp", "hidden": [64]},
    "algorithm": {"name": "fedavg"},
    "schedule": {"rounds": 10, "clients_per_round": "all"},
    "training": {"federated": {"steps": 1, "optimizer": "sgd", "learning_rate": 0.1}},
    "engine": {"workers": 1},
    "privacy": {
        "sampling_rate": 0.5, "expected_batch_size": 50.0, "noise_multiplier": 2.0, "noise_source": "seeded",
    },
}  # fmt: skip


def test_the_bound_is_that_of_the_paper() -> None:
    """Pure privacy: right guesses are binomial with e^eps / (1 + e^eps), so the p-value is a tail of it."""
    from scipy.stats import binom

    for epsilon in (0.0, 1.0, 3.0):
        share = np.exp(epsilon) / (1 + np.exp(epsilon))
        assert p_value(100, 100, 80, epsilon, 0.0) == pytest.approx(binom.sf(79, 100, share))
    assert p_value(100, 100, 80, 1.0, 1e-3) > p_value(100, 100, 80, 1.0, 0.0)
    assert lower_bound(1000, 1000, 500, 1e-5, 0.95) == 0.0  # a fair coin proves nothing
    bounds = [lower_bound(1000, 1000, right, 1e-5, 0.95) for right in (600, 700, 900)]
    assert 0 < bounds[0] < bounds[1] < bounds[2] < largest_bound(1000, 1e-5, 0.95)
    assert lower_bound(1000, 1000, 731, 0.0, 0.95) == pytest.approx(0.87, abs=0.05)  # e / (1 + e) of them: about 1


def test_guesses_at_random_prove_nothing_and_sure_ones_nearly_all_that_is_provable() -> None:
    rng = np.random.default_rng(0)
    coins = rng.random(1000) < 0.5
    assert best_bound(rng.normal(size=1000), coins, 1e-5, 0.95)[0] < 0.5
    assert best_bound(coins + 0.01 * rng.normal(size=1000), coins, 1e-5, 0.95)[0] > 4.0


def test_canaries_are_in_the_training_data_where_the_coin_fell() -> None:
    federation = tiny_federation()
    canaries = draw_canaries(federation, 40, 0)
    held = with_canaries(federation, canaries)
    for client, one in canaries.items():
        added = len(held.load(client).train.y) - len(federation.load(client).train.y)
        assert added == int(one.included.sum()) and 0 < added < 10
    assert len(held.load(2).train.y) == len(federation.load(2).train.y)  # it opted out


def test_an_honest_ledger_is_not_contradicted() -> None:
    found = audit_canaries(parse_config(TABLE), 400)
    assert found.upper is not None and found.lower <= found.upper < found.largest


def test_noise_that_was_set_to_zero_behind_the_ledgers_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateSteps, "noise", lambda _self, _client, _step, count, _sensitivity: torch.zeros(count))
    config = parse_config({**TABLE, "privacy": {**TABLE["privacy"], "noise_multiplier": 4.0}})
    with pytest.raises(RunError, match="is not what the ledger says"):
        audit_canaries(config, 1000)


def test_without_noise_there_is_no_claim_and_the_attack_shows_it() -> None:
    config = parse_config({**TABLE, "privacy": {**TABLE["privacy"], "noise_multiplier": 0.0}})
    found = audit_canaries(config, 400)
    assert found.upper is None and found.no_guarantee and found.lower > 1.0


def test_the_command_prints_both_bounds(tmp_path) -> None:
    file = tmp_path / "run.toml"
    import tomli_w

    file.write_text(tomli_w.dumps(TABLE))
    shown = CliRunner().invoke(app, ["audit", "canary", str(file), "--canaries", "100"])
    assert shown.exit_code == 0, shown.output
    assert "at least" in shown.output and "at most" in shown.output and "provable" in shown.output


def test_what_cannot_be_audited_is_said(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no claim to audit"):
        audit_canaries(parse_config({key: value for key, value in TABLE.items() if key != "privacy"}))
    federation = fedmoe.federation_from_clients({"a": (torch.ones(9, 2), torch.ones(9))}, task="regression")
    with pytest.raises(ConfigError, match="real numbers and classes"):
        draw_canaries(federation, 10, 0)
