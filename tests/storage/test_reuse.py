from typing import NamedTuple

import pytest
import torch

from fedmoe.core_types import Tensors
from fedmoe.storage.checkpoints import Checkpoint, load_newest, save_checkpoint
from fedmoe.storage.reuse import adopt_rounds
from fedmoe.storage.rundir import RunDirectory


class Server(NamedTuple):
    model: Tensors


def finished(path, run_id):
    run = RunDirectory(path)
    with run.opened():
        run.truncate_metrics(0)
        for number in (1, 2, 3):
            run.append_metrics([{"event": "round", "round": number}])
            state = Server({"w": torch.full((2,), float(number))})
            save_checkpoint(run.checkpoints, Checkpoint(number, state, {"metrics": run.metrics_state()}), run_id)
        run.append_metrics([{"event": "score", "client": 0}])
    return run


@pytest.fixture
def source(tmp_path):
    return finished(tmp_path / "source", "source-id")


@pytest.fixture
def target(tmp_path):
    run = RunDirectory(tmp_path / "target")
    with run.opened():
        yield run


def adopt(source, target):
    return adopt_rounds(source, target, Server, ("source-id", "target-id"))


def test_the_last_round_and_its_metrics_become_those_of_the_target(source, target):
    assert adopt(source, target) == (True, [])
    checkpoint, notes = load_newest(
        target.checkpoints, Server, "target-id", lambda found: target.check_metrics(*found.note["metrics"])
    )
    assert notes == [] and checkpoint.round == 3 and checkpoint.server.model["w"].tolist() == [3, 3]
    assert [event["event"] for event in target.read_metrics()] == ["round"] * 3  # scores are the source's own
    assert load_newest(source.checkpoints, Server, "source-id")[0].round == 3


def test_a_target_that_has_begun_is_left_alone(source, target):
    save_checkpoint(target.checkpoints, Checkpoint(1, Server({"w": torch.zeros(2)}), {}), "target-id")
    assert adopt(source, target) == (False, [])
    assert load_newest(target.checkpoints, Server, "target-id")[0].round == 1 and not target.metrics.exists()


def test_nothing_is_adopted_from_metrics_that_have_changed(source, target):
    source.metrics.write_bytes(b"")
    adopted, notes = adopt(source, target)
    assert not adopted
    assert list(target.checkpoints.iterdir()) == []
    assert notes[-1].startswith("no checkpoint is usable")
