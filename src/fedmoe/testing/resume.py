"""A run that was stopped or killed, and then resumed, ends as one that was not: to the last bit."""

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from fedmoe import trees
from fedmoe.clients.federation import ClientDataset, Federation
from fedmoe.core_types import ClientId
from fedmoe.errors import Stopped
from fedmoe.experiment import never, run_events
from fedmoe.result import Result
from fedmoe.storage.checkpoints import load_newest
from fedmoe.storage.rundir import RunDirectory
from fedmoe.testing.federation import make_common_expert, make_expert, make_gate, tiny_config, tiny_federation
from fedmoe.testing.outcome import read_private
from fedmoe.testing.subject import Subject, require, require_same

ROUNDS = 4
KILLED_AT = (8, 9, 10, 11, 12, 13, 19, 23, 14, 7, 9, 12)  # calls of `load`


def run(
    subject: Subject,
    directory: Path,
    *,
    federation: Federation | None = None,
    should_stop: Callable[[], bool] = never,
    **options: Any,
) -> Result:
    events = run_events(
        tiny_config(rounds=ROUNDS, backend=subject.backend, **options),
        directory,
        federation=federation or tiny_federation(),
        expert=make_expert,
        gate=make_gate,
        algorithm=subject.factory,
        common_expert=make_common_expert(),
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


def stop_and_resume(checkpoint_every: int) -> Callable[[Subject, Path], None]:
    def check(subject: Subject, folder: Path) -> None:
        algorithm = subject.make()
        options: dict[str, Any] = {
            "checkpoint_every": checkpoint_every,
            "release": algorithm.release is not None,
        }
        expected = end_state(run(subject, folder / "whole", **options))
        stops = 0
        for question in (4, 3, 2):  # in the rounds, and while clients are personalised
            try:
                run(subject, folder / "parts", should_stop=_at_question(question), **options)
            except Stopped:
                stops += 1
        result = run(subject, folder / "parts", **options)
        wanted = bool(algorithm.round) + (algorithm.personalize is not None)
        require(stops >= wanted, f"the run was to be stopped {wanted} times or more, but was {stops} times.")
        require_same(end_state(result), expected, "a run that was stopped and resumed ends otherwise")

    return check


def _at_question(number: int) -> Callable[[], bool]:
    asked = count(1)
    return lambda: next(asked) >= number


class KillingFederation:
    """`load` that kills its process, as the system does when memory runs out, at its given call.

    Each process counts for itself. The one that made this is spared: it runs the test.
    """

    def __init__(self, plain: Federation, at_call: int) -> None:
        self.plain, self.at_call, self.calls = plain, at_call, Counter({os.getpid(): -(10**9)})

    def load(self, client: ClientId) -> ClientDataset:
        self.calls[os.getpid()] += 1
        if self.calls[os.getpid()] == self.at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.plain.load(client)

    @classmethod
    def make(cls, at_call: int) -> Federation:
        plain = tiny_federation()
        return replace(plain, load=cls(plain, at_call).load)


def kill_and_resume(subject: Subject, folder: Path) -> None:
    """Killed at a dozen places: in rounds after some private states were written, in delivery, in personalisation."""
    expected = end_state(run(subject, folder / "whole", checkpoint_every=2))
    codes = [killed_at(at_call, subject, folder / "parts", checkpoint_every=2) for at_call in KILLED_AT]
    kills = codes.count(-signal.SIGKILL)
    require(kills >= 4, f"the run was to be killed 4 times or more, but was {kills} times: it ended before.")
    resumed = end_state(run(subject, folder / "parts", checkpoint_every=2))
    require_same(resumed, expected, "a run that was killed and resumed ends otherwise")


def killed_at(at_call: int, subject: Subject, directory: Path, **options: Any) -> int | None:
    """The exit code of a process that runs or resumes in `directory`; 0 if it came to the end before its death."""
    arguments = {"federation": KillingFederation.make(at_call), **options}
    process = multiprocessing.get_context("fork").Process(target=run, args=(subject, directory), kwargs=arguments)
    process.start()
    process.join(timeout=60)
    code = process.exitcode
    require(code in (-signal.SIGKILL, 0), f"a run that was resumed after a kill ended with exit code {code}.")
    return code


def a_damaged_checkpoint_costs_a_round_and_nothing_else(subject: Subject, folder: Path) -> None:
    """Private states of the round before are still there when the newest checkpoint turns out to be cut short."""
    whole = run(subject, folder / "whole")
    before_the_last = iter([False] * (ROUNDS - 1) + [True] * 99)  # asked before each round
    try:
        run(subject, folder / "cut", should_stop=lambda: next(before_the_last))
    except Stopped:
        pass
    else:
        raise AssertionError("the run was to be stopped after two rounds, but came to its end.")
    checkpoints = sorted((folder / "cut" / "checkpoints").glob("*.safetensors"))
    require(len(checkpoints) == 2, f"two checkpoints were to be there, not {len(checkpoints)}.")
    checkpoints[-1].write_bytes(checkpoints[-1].read_bytes()[:50])
    resumed = run(subject, folder / "cut")
    require(resumed.scores == whole.scores, "a run that lost its newest checkpoint ends with other scores.")
    delivered = [trees.to_bytes(result.delivered[0]) for result in (resumed, whole)]
    require(delivered[0] == delivered[1], "a run that lost its newest checkpoint delivers another model.")
