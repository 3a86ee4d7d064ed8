"""Rounds that were abandoned and replies that were lost are resumed over like any others: to the last bit."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from builders import Around, make_common_expert, make_gate, tiny_config, tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe import wire
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config_sections import EvaluationConfig
from fedmoe.engines.catalog import open_transport
from fedmoe.errors import Stopped
from fedmoe.experiment import never, run_events
from fedmoe.result import Result
from fedmoe.testing.resume import end_state

ROUNDS = 6
ALGORITHMS = {name: entry.factory(entry.config(), tiny_setup()) for name, entry in {**CATALOG, **PROBES}.items()}
STATEFUL = [
    pytest.param(name, marks=pytest.mark.slow if name in PROBES else ())
    for name, algorithm in ALGORITHMS.items()
    if algorithm.keeps_client_state
]


def stop_at_question(number: int) -> Callable[[], bool]:
    asked = count(1)
    return lambda: next(asked) >= number


class Lossy(Around):
    """A transport that loses about every other reply: the same ones each time."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            what = json.dumps([asked.get(key) for key in ("do", "phase", "index", "round", "clients")])
            if asked["do"] != "exchange" or hashlib.blake2b(what.encode()).digest()[0] % 2:
                yield index, reply


@contextmanager
def lossy_transport(*arguments: Any) -> Iterator[Lossy]:
    with open_transport(*arguments) as transport:
        yield Lossy(transport)


@pytest.fixture(autouse=True)
def probes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in PROBES.items():
        monkeypatch.setitem(CATALOG, name, entry)


def half_frozen() -> nn.Module:
    frozen = nn.Linear(4, 5).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), frozen, nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def finish(name: str, directory: Path, should_stop: Any = never, checkpoint_every: int = 2) -> Result:
    # Of a round with two exchanges half of a half is left.
    min_clients = 1 if len(ALGORITHMS[name].round) > 1 else 2
    config = tiny_config(name, rounds=ROUNDS, min_clients=min_clients, checkpoint_every=checkpoint_every, release=True)
    engine = config.engine.model_copy(update={"cohort_size": 1})
    config = config.model_copy(update={"evaluation": EvaluationConfig(every=2), "engine": engine})
    own = {"federation": tiny_federation(), "expert": half_frozen, "gate": make_gate}
    own["common_expert"] = make_common_expert()
    *_, result = run_events(config, directory, **own, should_stop=should_stop, connect=lossy_transport)  # type: ignore[arg-type]
    assert isinstance(result, Result)
    return result


@pytest.mark.parametrize("name", [*STATEFUL, "fedavg"])
def test_a_run_with_lost_replies_is_resumed(name: str, tmp_path: Path) -> None:
    whole = finish(name, tmp_path / "whole")
    assert 1 <= whole.data["abandoned_rounds"] < ROUNDS
    assert {row["reason"] for row in whole.session.manifest.rejected} == {"it did not reply"}
    for question in (3, 2, 4, 3, 2, 2, 2):
        try:
            finish(name, tmp_path / "parts", stop_at_question(question))
        except Stopped:
            continue
    found, expected = end_state(finish(name, tmp_path / "parts")), end_state(whole)
    # What has been superseded may be there still or not: a stop writes a checkpoint more.
    rows, expected_rows = found.pop("private"), expected.pop("private")
    assert found == expected
    assert all(rows[key] == expected_rows[key] for key in rows.keys() & expected_rows.keys())
    assert [key for key in rows if key[0] == "final"] == [key for key in expected_rows if key[0] == "final"]


@pytest.mark.parametrize("name", STATEFUL)
def test_the_older_checkpoint_finds_the_states_that_it_needs(name: str, tmp_path: Path) -> None:
    """Whatever was dropped when the newest one was written."""
    whole = end_state(finish(name, tmp_path / "whole", checkpoint_every=1))
    for questions in (3, 5, 6):
        folder = tmp_path / str(questions)
        with pytest.raises(Stopped):
            finish(name, folder, stop_at_question(questions), checkpoint_every=1)
        *_, older, newest = sorted((folder / "checkpoints").glob("*.safetensors"))
        newest.write_bytes(newest.read_bytes()[:50])
        found = end_state(finish(name, folder, checkpoint_every=1))
        assert found == {**whole, "notes": found["notes"]}
        assert (folder / "checkpoints" / f"{newest.name}.set-aside").exists() and older.name < newest.name
