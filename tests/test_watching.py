"""A run seen from outside: in the terminal, and as TensorBoard's scalars."""

import io
import json

import pytest
from rich.console import Console

from fedmoe.display.tensorboard import TensorBoardSink
from fedmoe.display.watching import watch
from fedmoe.errors import RunError

CONFIG = """
seed = 3
schedule = { rounds = 4 }
algorithm = { name = "fedmix", label = "mix [q]" }
recorded = { run_id = "00000000000000000000000000000000" }
"""


def event(number, loss):
    experts = {"load": [0.25, 0.75], "usage_entropy": 0.5}
    made = {"event": "round", "round": number, "reports": {"training_loss": loss}, "seconds": 2.0, "experts": experts}
    return {**made, "warnings": ["expert 0 is dead"] if number == 2 else []}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    curve = {"event": "curve", "round": 2, "own": 0.5, "global": 0.4, "unseen": None, "pooled": None}
    events = [event(1, 2.0), event(2, 1.0), curve]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events) + '{"half')
    return tmp_path


def test_a_run_under_way_is_shown_with_what_is_left(run):
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    looked = []
    watch(run, console, lambda: looked.append(1), once=True)
    shown = console.file.getvalue()
    for words in (
        "mix [q], seed 3: training",
        "2 of 4, about 4 s of rounds left",
        "training loss",
        "25% / 75%",
        "is dead",
    ):
        assert words in shown
    assert looked == [1]


def test_the_view_ends_with_the_run(run):
    (run / "finished.json").write_text("{}")
    console = Console(file=io.StringIO(), width=120)
    watch(run, console, lambda: None)
    assert "finished" in console.file.getvalue()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(RunError, match="holds no run to watch"):
        watch(tmp_path, Console(file=io.StringIO()), lambda: None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_round_once_and_what_comes_later(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardSink(run) as sink:
        sink.look()
        content = (run / "metrics.jsonl").read_text().removesuffix('{"half')
        (run / "metrics.jsonl").write_text(content + json.dumps(event(3, 0.5)) + "\n")
    found = accumulator.EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("rounds/training_loss")] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert [one.value for one in found.Scalars("scores/own")] == [0.5]
    assert found.Scalars("experts/load 1")[0].value == 0.75
