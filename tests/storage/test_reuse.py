from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.storage.checkpoints import Checkpoint, load_newest, save_checkpoint
from fedmoe.storage.reuse import adopt_rounds
from fedmoe.storage.rundir import RunDirectory
from fedmoe.trees import from_named, to_named


class Server(NamedTuple):
    model: Tensors


class Calibrated(NamedTuple):
    shared: Server
    bias: Tensor


def of_round(number):
    return Server({"w": torch.full((2,), float(number))})


def finished(path, run_id):
    run = RunDirectory(path)
    with run.opened():
        run.truncate_metrics(0)
        for number in (1, 2, 3):
            run.append_metrics([{"event": "round", "round": number}])
            state = of_round(number)
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


def adopt(source, target, rounds=3):
    return adopt_rounds(source, target, rounds, ("source-id", "target-id"), read_server)


def read_server(state):
    return from_named(Server, to_named(state))


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


def test_what_followed_the_rounds_of_the_source_is_not_adopted(source, target):
    for step in (3, 4):
        with source.opened():
            source.append_metrics([{"event": "round" if step == 3 else "after_rounds", "round": step}])
            note = {"metrics": source.metrics_state(), "rounds_field": "shared"}
            state = Calibrated(of_round(30), torch.ones(1))
            save_checkpoint(source.checkpoints, Checkpoint(step, state, note), "source-id", 3)
    before = sorted(path.name for path in source.checkpoints.iterdir())
    assert adopt(source, target) == (True, [])
    checkpoint, _ = load_newest(target.checkpoints, Server, "target-id")
    assert checkpoint.round == 3 and checkpoint.server.model["w"].tolist() == [30, 30]
    assert "after_rounds" not in {event["event"] for event in target.read_metrics()}
    assert sorted(path.name for path in source.checkpoints.iterdir()) == before


def test_a_state_of_another_form_is_not_adopted_and_the_run_says_so(source, target):
    other = adopt_rounds(source, target, 3, ("source-id", "target-id"), lambda s: from_named(Calibrated, to_named(s)))
    assert not other[0] and "computed again" in other[1][-1] and "has no field 'model'" in other[1][-1]
    assert list(target.checkpoints.iterdir()) == [] and not target.metrics.exists()
