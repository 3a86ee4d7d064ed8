"""`fedmoe.run` where what it is given does not say enough."""

from typing import Any

import pytest
from torch import nn

import fedmoe

SMALL: dict[str, Any] = {
    "split": {"num_clients": 2, "train_size": 5, "validation_size": 3, "test_size": 5, "global_test_size": 10},
    "algorithm": {"name": "fedavg"},
    "schedule": {"rounds": 1, "clients_per_round": "all"},
    "engine": {"workers": 1},
}


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("module", ["expert", "gate"])
def test_an_own_module_without_data_is_not_trained_on_the_default_data(tmp_path, module):
    with pytest.raises(fedmoe.ConfigError, match=rf"{module}= is given.*trained on 'digits'.*federation="):
        fedmoe.run(SMALL, directory=tmp_path / "run", **{module: make_expert})
    assert not (tmp_path / "run").exists()


def test_an_own_module_is_trained_on_data_that_are_named(tmp_path):
    result = fedmoe.run({**SMALL, "data": {"name": "digits"}}, directory=tmp_path, expert=make_expert)
    assert result.data["model_weights"] == 650
