"""A run that was stopped or killed, and then resumed, ends as one that was not: to the last bit."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from builders import make_expert, make_gate, read_private, tiny_config, tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe import trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.clients.federation import Federation, Records
from fedmoe.core_types import ClientId
from fedmoe.errors import RunError, Stopped
from fedmoe.experiment import never, run_events
from fedmoe.result import Result
from fedmoe.storage.checkpoints import load_newest
from fedmoe.storage.rundir import RunDirectory

ENTRIES = CATALOG | PROBES
# What a test needs to know of an algorithm is in its fields, so a new one is tested as it is.
ALGORITHMS = {name: entry.factory(entry.config(), tiny_setup()) for name, entry in ENTRIES.items()}
WITH_STATE = [name for name, algorithm in ALGORITHMS.items() if algorithm.keeps_client_state]
ROUNDS = 4


@pytest.fixture(autouse=True)
def probes_in_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in PROBES.items():
        monkeypatch.setitem(CATALOG, name, entry)


def run(
    name: str,
    directory: Path,
    *,
    federation: Federation | None = None,
    should_stop: Callable[[], bool] = never,
    **options: Any,
) -> Result:
    events = run_events(
        tiny_config(name, rounds=ROUNDS, **options),
        directory,
        federation=federation or tiny_federation(),
        expert=make_expert,
        gate=make_gate,
        should_stop=should_stop,
    )
    *_, result = events
    assert isinstance(result, Result)
    return result


def end_state(result: Result) -> dict[str, Any]:
    """What a run leaves on disk, without the time of day."""
    folder = RunDirectory(result.directory)
    run_id = folder.read_config()["recorded"]["run_id"]
    checkpoint, notes = load_newest(folder.checkpoints, result.algorithm.server_type, run_id)
    return {
        "server": trees.to_bytes(checkpoint.server) if checkpoint else None,
        "notes": notes,
        "private": read_private(folder.private_store),
        "scores": result.data["scores"],
        "manifest": folder.manifest.read_text(),
        "metrics": [{**event, "seconds": 0} for event in folder.read_metrics()],
        "history": [{**event, "seconds": 0} for event in result.data["history"]],
        "warnings": result.data["warnings"],
    }


def stop_at_question(number: int) -> Callable[[], bool]:
    asked = count(1)
    return lambda: next(asked) >= number


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_stop_and_resume(name: str, checkpoint_every: int, tmp_path: Path) -> None:
    options = {"checkpoint_every": checkpoint_every, "release": ALGORITHMS[name].release is not None}
    expected = end_state(run(name, tmp_path / "whole", **options))
    stops = 0
    for question in (4, 3, 2):  # in the rounds, and while clients are personalised
        try:
            result = run(name, tmp_path / "parts", should_stop=stop_at_question(question), **options)
        except Stopped:
            stops += 1
    result = run(name, tmp_path / "parts", **options)
    goes_on = (bool(ALGORITHMS[name].round), ALGORITHMS[name].personalize is not None)
    assert stops >= sum(goes_on)
    assert end_state(result) == expected


class KillingFederation:
    """`load` that kills its process, as the system does when memory runs out, at the given call."""

    def __init__(self, plain: Federation, at_call: int) -> None:
        self.plain, self.at_call, self.calls = plain, at_call, 0

    def load(self, client: ClientId) -> Records:
        self.calls += 1
        if self.calls == self.at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.plain.load(client)

    @classmethod
    def make(cls, at_call: int) -> Federation:
        plain = tiny_federation()
        return replace(plain, load=cls(plain, at_call).load)


@pytest.mark.parametrize("name", WITH_STATE)
def test_kill_and_resume(name: str, tmp_path: Path) -> None:
    """Killed at a dozen places: in rounds after some private states were written, in delivery, in personalisation."""
    expected = end_state(run(name, tmp_path / "whole", checkpoint_every=2))
    codes = [
        killed_at(at_call, name, tmp_path / "parts", checkpoint_every=2)
        for at_call in (8, 9, 10, 11, 12, 13, 19, 23, 14, 7, 9, 12)
    ]
    assert codes.count(-signal.SIGKILL) >= 4
    assert end_state(run(name, tmp_path / "parts", checkpoint_every=2)) == expected


def killed_at(at_call: int, name: str, directory: Path, **options: Any) -> int | None:
    """The exit code of a process that runs or resumes in `directory`; 0 if it came to the end before its death."""
    arguments = {"federation": KillingFederation.make(at_call), **options}
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, directory), kwargs=arguments)
    process.start()
    process.join(timeout=60)
    assert process.exitcode in (-signal.SIGKILL, 0)
    return process.exitcode


@pytest.mark.parametrize("name", ["private_expert", "pruned_experts"])
def test_kill_between_checkpoints_and_resume_with_more_of_them(name: str, tmp_path: Path) -> None:
    """States of rounds that are run again must not drive out those that they start from."""
    expected = end_state(run(name, tmp_path / "whole"))
    assert killed_at({"private_expert": 16, "pruned_experts": 8}[name], name, tmp_path / "parts", checkpoint_every=4)
    rounds_written = {version for _, _, version in read_private(RunDirectory(tmp_path / "parts").private_store)}
    assert len(rounds_written) >= 2
    assert end_state(run(name, tmp_path / "parts", checkpoint_every=1)) == expected


def test_a_worker_is_killed_and_the_run_resumed(tmp_path: Path) -> None:
    expected = end_state(run("pruned_experts", tmp_path / "whole", workers=2))
    for at_call in (4, 5):
        with pytest.raises(RunError, match="exit code -9"):
            run("pruned_experts", tmp_path / "parts", workers=2, federation=KillingFederation.make(at_call))
    assert end_state(run("pruned_experts", tmp_path / "parts", workers=2)) == expected


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_damaged_checkpoint_costs_a_round_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Private states of the round before are still there when the newest checkpoint turns out to be cut short."""
    whole = run(name, tmp_path / "whole")
    before_the_last = iter([False] * (ROUNDS - 1) + [True] * 99)  # asked before each round
    with pytest.raises(Stopped):
        run(name, tmp_path / "cut", should_stop=lambda: next(before_the_last))
    checkpoints = sorted((tmp_path / "cut" / "checkpoints").glob("*.safetensors"))
    assert len(checkpoints) == 2
    checkpoints[-1].write_bytes(checkpoints[-1].read_bytes()[:50])
    resumed = run(name, tmp_path / "cut")
    assert resumed.scores == whole.scores
    assert trees.to_bytes(resumed.delivered[0]) == trees.to_bytes(whole.delivered[0])
