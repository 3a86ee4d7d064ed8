"""Systems that take turns: each a process of its own (see `serve.py`), one at work at a time.

Machines are shared and noisy. Systems that run right after one another see the same machine, so a turn gives ratios,
and the median of the ratios counts; every other turn goes in reverse order.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from load import OtherWork
from memory import Peak
from serve import MARK
from workloads import Workload

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parent / ".bench"
LONGEST_ANSWER = 1200  # seconds; a peer that hangs must not hang the others
LAST_WORDS = 15  # lines of a failed system's output that are shown

Line = dict[str, Any]


class SystemFailedError(Exception):
    """A measured system ended, or did not answer in time."""


class System:
    """`rounds` of a timed turn, and before the first one to warm up; `about` is what the system tells of itself."""

    def __init__(self, name: str, command: Sequence[str], rounds: int, warm_rounds: int | None = None) -> None:
        self.name, self.command, self.rounds = name, command, rounds
        self.warm_rounds = min(2, rounds) if warm_rounds is None else warm_rounds
        self.about: Line = {}

    def __enter__(self) -> "System":
        logs = SCRATCH / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{re.sub(r'[^a-z0-9]+', '_', self.name.lower())}.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path()},
                text=True,
            )
        self.peak = Peak(self.process.pid)
        try:
            self.about = self._answer()
        except SystemFailedError:
            self._end()
            raise
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._end()

    def run(self, rounds: int) -> float:
        """Seconds that the system itself counted."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{rounds}\n")
            self.process.stdin.flush()
        except OSError:
            raise self._failed() from None
        seconds: float = self._answer()["seconds"]
        return seconds

    def warm_up(self) -> None:
        with self.peak.watched():
            self.run(self.warm_rounds)

    def _answer(self) -> Line:
        assert self.process.stdout is not None
        clock = threading.Timer(LONGEST_ANSWER, self.process.kill)
        clock.start()
        try:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    answer: Line = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            clock.cancel()
        raise self._failed()

    def _failed(self) -> SystemFailedError:
        code = self.process.wait()
        words = self.log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS:]
        return SystemFailedError(f"{self.name} ended with exit code {code}:\n" + "\n".join(words))

    def _end(self) -> None:
        """A system leaves when its standard input ends; one that does not is stopped."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def python_path() -> str:
    """Where systems find these files; the library is found as in this process."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def ours(workload: Workload) -> System:
    return System("ours", [sys.executable, str(HERE / "ours.py"), workload.name], workload.rounds)


def plain(workload: Workload, processes: int, *, authors_way: bool = False) -> System:
    command = [sys.executable, str(HERE / "plain_loop.py"), workload.name, "--processes", str(processes)]
    if authors_way:  # minutes: long enough to need no warming up
        return System("authors' way", [*command, "--authors-way"], workload.rounds, warm_rounds=0)
    return System("one process" if processes == 1 else "one process per core", command, workload.rounds)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def take_turns(systems: Sequence[System], repeats: int) -> Line:
    """What each system is, its seconds in each turn, and its memory; how much faster the first is than each other."""
    load, others = os.getloadavg()[0], OtherWork()
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    with ExitStack() as stack:
        for system in systems:
            stack.enter_context(system)
            system.warm_up()
        for turn in range(repeats):
            for system in systems[:: -1 if turn % 2 else 1]:
                seconds[system.name].append(system.run(system.rounds))
        for system in systems:
            system.peak.look()
    return {
        "systems": {
            system.name: {
                "rounds": system.rounds,
                "seconds": [round(second, 4) for second in seconds[system.name]],
                "peak_pss_mb": round(system.peak.memory.pss),
                "peak_rss_mb": round(system.peak.memory.rss),
                **system.about,
            }
            for system in systems
        },
        "load_before": round(load, 2),
        "cores_busy_with_others": round(others.cores(), 2),
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> Line:
    """Median and spread of `over / under`, turn by turn."""
    values = [a / b for a, b in zip(over, under, strict=True)]
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def speed_of_ours(line: Line) -> Line:
    """How many times faster ours was than each other system that did the same rounds."""
    systems = line["systems"]
    own = systems["ours"]
    return {
        name: ratios(system["seconds"], own["seconds"])
        for name, system in systems.items()
        if name != "ours" and system["rounds"] == own["rounds"]
    }


def machine() -> Line:
    return {"cpu": cpu_name(), "cores": cores(), "system": platform.platform()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()
