from pathlib import Path

import pytest
import torch

from fedmoe import assembly
from fedmoe.config import ExperimentConfig
from fedmoe.errors import ConfigError, DataError
from fedmoe.silos.silo_data import node_federation, server_federation
from silos.apps import CLIENTS, client_rows, silo_config, template_config


def with_opted_out(config: ExperimentConfig, *clients: int) -> ExperimentConfig:
    return config.model_copy(update={"opt_out": config.opt_out.model_copy(update={"clients": clients})})


def test_a_server_builds_every_part_without_data() -> None:
    parts = assembly.build(silo_config(), federation=server_federation(silo_config()))
    assert parts.federation.num_clients == CLIENTS and parts.federation.is_elsewhere
    assert parts.fallback_notes() == [] and parts.cohort_size == 1
    assert not parts.federation.load(0).train.x.any() and not parts.federation.load(0).train_opted_in.any()


def test_a_node_has_the_records_of_its_own_client_alone() -> None:
    x, y = client_rows(1)
    federation = node_federation(silo_config(), 1, {"train": (x, y), "test": (x[:3], y[:3])})
    assert torch.equal(federation.load(1).test.x, x[:3])
    assert not federation.load(0).train.x.any()
    assert federation.participants.tolist() == [0, 1, 2]


def test_some_records_or_all_may_be_opted_out() -> None:
    x, y = client_rows(1)
    mask = torch.arange(len(y)) % 2 == 0
    some = node_federation(silo_config(), 1, {"train": (x, y), "opted_out": mask})
    assert 0 < some.load(1).train_opted_in.sum() < len(some.load(1).train_opted_in)
    assert some.participates(1)
    for everything in (True, torch.ones(len(y), dtype=torch.bool)):
        none = node_federation(silo_config(), 1, {"train": (x, y), "opted_out": everything})
        assert len(none.load(1).train.y) and not none.load(1).train_opted_in.any() and not none.participates(1)


def test_a_client_that_the_config_opts_out_takes_no_part() -> None:
    config = with_opted_out(silo_config(), 1)
    assert server_federation(config).participants.tolist() == [0, 2]
    assert not node_federation(config, 1, client_rows(1)).participates(1)
    with pytest.raises(ConfigError, match=r"opt_out.clients=7, but the clients are numbered 0 to 2"):
        server_federation(with_opted_out(silo_config(), 7))


@pytest.mark.parametrize("name", ["num_clients", "num_classes", "input_shape"])
def test_what_a_server_must_be_told_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.flower.{name} is missing. A server holds no data"):
        server_federation(silo_config(**{name: [] if name == "input_shape" else None}))


def test_data_that_do_not_fit_the_model_are_said() -> None:
    x, y = client_rows(0)
    with pytest.raises(
        DataError, match=r"examples of torch.float32 \(3,\), but the config declares torch.float32 \(4,\)"
    ):
        node_federation(silo_config(), 0, (x[:, :3], y))
    with pytest.raises(DataError, match="label is 2"):
        node_federation(silo_config(num_classes=2), 0, (x, y))
    with pytest.raises(DataError, match=r"partition-id is 3, but engine.flower.num_clients=3"):
        node_federation(silo_config(), 3, (x, y))


def test_the_template_is_a_config_of_this_package(tmp_path: Path) -> None:
    config = template_config(tmp_path / "silo_app")
    assert server_federation(config).num_clients == 3 and config.name == "silo_app"
