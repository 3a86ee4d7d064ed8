import multiprocessing
import os
import resource
import select
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import RUN_ID, Around, Outcome, run_algorithm, tiny_federation, tiny_parts, tiny_setup
from contract.probes import PROBES
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.encoding import Bytes
from fedmoe.engines import embedded
from fedmoe.engines.embedded import Forked, InProcess, start
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError
from fedmoe.interrupts import stop_on_signals

PATIENCE = 20.0  # seconds: a bound, not a delay


class Echo:
    """Stands where a Worker would: replies to a frame with itself, unless the frame says how to die."""

    def handle(self, frame: bytes) -> bytes:
        if frame.startswith(b"exit"):
            os._exit(int(frame[4:]))
        if frame == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return frame

    def close(self) -> None:
        self.closed = True


def forked(num_workers: int) -> Forked:
    return Forked(Echo(), num_workers)  # type: ignore[arg-type]


class Lifeline:
    """A pipe that every process forked meanwhile holds open: it ends when the last of them does."""

    def __enter__(self) -> "Lifeline":
        self.reader, self.writer = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.reader)

    def all_ended(self) -> bool:
        os.close(self.writer)
        ready, _, _ = select.select([self.reader], [], [], PATIENCE)
        return bool(ready)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_frame_gets_its_reply_under_its_index(num_workers: int) -> None:
    frames = [f"frame {index}".encode() for index in range(7)]
    with start(Echo(), num_workers) as transport:  # type: ignore[arg-type]
        replies = dict(transport.run(frames))
        assert list(transport.run([])) == []
    assert replies == dict(enumerate(frames))


def test_one_worker_needs_no_process() -> None:
    assert isinstance(start(Echo(), 1), InProcess)  # type: ignore[arg-type]
    assert isinstance(start(Echo(), 2), Forked)  # type: ignore[arg-type]


def test_a_single_frame_is_handled_here_without_waking_anyone() -> None:
    class WhoAmI(Echo):
        def handle(self, frame: bytes) -> bytes:
            return str(os.getpid()).encode()

    worker = WhoAmI()
    with Forked(worker, 2) as transport:  # type: ignore[arg-type]
        (alone,) = dict(transport.run([b"one"])).values()
        several = dict(transport.run([b"one", b"two", b"three"])).values()
    assert alone == str(os.getpid()).encode() and alone not in several
    assert worker.closed  # its store: a connection must not live on into another fork


def test_a_large_frame_passes() -> None:
    frame = os.urandom(3_000_000)
    with forked(2) as transport:
        assert dict(transport.run([frame, frame])) == {0: frame, 1: frame}


@pytest.mark.parametrize(("order", "code"), [(b"exit3", "exit code 3"), (b"kill", "exit code -9")])
def test_the_death_of_a_worker_is_reported(order: bytes, code: str) -> None:
    with pytest.raises(RunError, match=code), forked(2) as transport:
        list(transport.run([b"fine", order, b"fine", b"fine"]))


class DiesOnce(Echo):
    """Kills its process at the first frame "die" that anybody handles: a file remembers it for the next process."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def handle(self, frame: bytes) -> bytes:
        if frame.startswith(b"die") and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return frame


def test_a_killed_worker_is_replaced_and_its_frame_run_again(tmp_path: Path) -> None:
    frames = [b"fine", b"die", b"fine", b"also fine"]
    with Lifeline() as lifeline:
        with Forked(DiesOnce(tmp_path / "died"), 2, retries=1) as transport:  # type: ignore[arg-type]
            before = [process.pid for process in transport._processes]
            assert dict(transport.run(frames)) == dict(enumerate(frames))
            assert len({process.pid for process in transport._processes} - set(before)) == 1
            assert dict(transport.run(frames)) == dict(enumerate(frames))
        assert (tmp_path / "died").exists()
        assert lifeline.all_ended()


def test_a_frame_that_kills_every_worker_ends_the_run() -> None:
    transport = Forked(Echo(), 2, retries=2)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"exit code -9 .* run 3 times, and engine.retries=2"), transport:
        list(transport.run([b"fine", b"kill", b"fine"]))


def test_a_worker_that_died_between_two_calls_is_replaced() -> None:
    """Whatever engine.retries says: no frame was on its way."""
    with forked(2) as transport:
        list(transport.run([b"fine", b"fine"]))
        for process in transport._processes:
            process.kill()
            process.join(PATIENCE)
        assert dict(transport.run([b"a", b"b", b"c"])) == {0: b"a", 1: b"b", 2: b"c"}


def test_a_worker_that_died_with_a_reply_that_nobody_read_is_replaced(tmp_path: Path) -> None:
    with Forked(DiesOnce(tmp_path / "died"), 2, retries=0) as transport:  # type: ignore[arg-type]
        replies = transport.run([b"fine", b"die"])
        with suppress(RunError):
            next(replies)
        replies.close()
        time.sleep(0.3)
        assert dict(transport.run([b"a", b"b"])) == {0: b"a", 1: b"b"}


def test_a_run_whose_worker_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """In each round a worker is killed; private states are those of the round that counted."""
    entry = CATALOG["fedrep"]

    class Killer(Around):
        def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
            replies = self.inner.run(frames)
            if len(frames) > 1:
                yield next(replies)
                os.kill(self.inner._processes[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            yield from replies

    def run(folder: str, through: Any) -> Outcome:
        algorithm = entry.factory(entry.config(), tiny_setup())
        return run_algorithm(
            algorithm, tiny_federation(), tmp_path / folder / "store", workers=2, cohort_size=1, through=through
        )

    assert run("killed", Killer).fingerprint() == run("whole", Around).fingerprint()


def test_a_worker_that_outlives_the_engine_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Slow(Echo):
        def handle(self, frame: bytes) -> bytes:
            time.sleep(0.3 if frame == b"slow" else 0)
            return super().handle(frame)

    with pytest.raises(RunError, match="exit code -9"), Forked(Slow(), 2) as transport:  # type: ignore[arg-type]
        list(transport.run([b"slow", b"kill"]))
    assert capfd.readouterr().err == ""


def test_a_worker_that_dies_within_a_frame_is_reported() -> None:
    """Half of its reply has arrived, and the rest never will."""

    class Half(Echo):
        def handle(self, frame: bytes) -> bytes:
            if frame == b"half":
                threading.Timer(0.3, os._exit, [7]).start()
                return bytes(50_000_000)  # more than fits on the way while nobody reads
            return frame

    with pytest.raises(RunError, match="exit code 7"), Forked(Half(), 2) as transport:  # type: ignore[arg-type]
        replies = transport.run([b"fine", b"half", b"fine"])
        next(replies)
        time.sleep(1)
        list(replies)


def test_a_caller_that_stops_early_gets_no_late_reply_for_a_later_frame() -> None:
    with forked(2) as transport:
        replies = transport.run([b"early 0", b"early 1", b"early 2", b"early 3"])
        next(replies)
        replies.close()
        assert dict(transport.run([b"later 0", b"later 1", b"later 2"])) == {
            index: f"later {index}".encode() for index in range(3)
        }


def test_signals_to_the_whole_group_are_left_to_the_parent() -> None:
    """Ctrl-C in a terminal, and the SIGTERM of a service manager or a batch system."""
    with forked(2) as transport:
        list(transport.run([b"fine", b"fine"]))
        for process in transport._processes:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(process.pid or 0, number)
        assert dict(transport.run([b"a", b"b"])) == {0: b"a", 1: b"b"}


def test_transports_of_this_machine_are_trusted() -> None:
    assert InProcess.trusted and Forked.trusted


def test_too_few_descriptors_are_reported_and_no_worker_stays_behind() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Lifeline() as lifeline:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 8, hard))
        try:
            with pytest.raises(RunError, match=r"30 worker processes could not be started: too many files.*ulimit -n"):
                forked(30).__enter__()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert lifeline.all_ended()


class Stuck(Echo):
    """Handles a frame "stop" by stopping, as SIGSTOP from outside would, and "sleep" by not coming to an end."""

    def handle(self, frame: bytes) -> bytes:
        if frame == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if frame == b"sleep":
            time.sleep(10 * PATIENCE)
        return frame


@pytest.mark.parametrize("frame", [b"stop", b"sleep"])
def test_an_engine_that_ends_with_an_error_does_not_wait_for_a_stuck_worker(frame: bytes) -> None:
    begun = time.monotonic()
    with Lifeline() as lifeline:
        with pytest.raises(ZeroDivisionError), Forked(Stuck(), 2) as transport:  # type: ignore[arg-type]
            next(transport.run([frame, b"fine"]))
            raise ZeroDivisionError
        assert lifeline.all_ended()
    assert time.monotonic() - begun < PATIENCE


def test_an_engine_that_ends_does_not_wait_long_for_a_stopped_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LEAVING_SECONDS", 0.3)
    with Lifeline() as lifeline:
        with forked(2) as transport:
            os.kill(transport._processes[0].pid or 0, signal.SIGSTOP)
        assert lifeline.all_ended()


@contextmanager
def in_another_process(engine: Callable[[Any], None]) -> Iterator[tuple[ForkProcess, Any]]:
    """`engine(ready)` in a process of its own, once it has sent its first message; it ends with the test."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=engine, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE)
        ours.recv_bytes()
        yield process, ours
    finally:
        process.kill()
        process.join(PATIENCE)


def run_until_asked(ready: Any) -> None:
    """As the command line does it: rounds until a signal asks to stop, one of them with a worker that is stopped."""
    with stop_on_signals() as request, Forked(Stuck(), 2) as transport:  # type: ignore[arg-type]
        list(transport.run([b"fine", b"fine"]))
        ready.send_bytes(b"working")
        list(transport.run([b"stop", b"fine"]))
        assert request()
        ready.send_bytes(b"ended the round")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_worker_is_woken_so_that_the_round_can_end(number: signal.Signals) -> None:
    with Lifeline() as lifeline, in_another_process(run_until_asked) as (process, line):
        time.sleep(0.5)
        assert process.is_alive() and process.pid and not line.poll(0)
        os.kill(process.pid, number)
        assert line.poll(PATIENCE) and line.recv_bytes() == b"ended the round"
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert lifeline.all_ended()


def run_stuck(ready: Any) -> None:
    with stop_on_signals(), Forked(Stuck(), 2) as transport:  # type: ignore[arg-type]
        list(transport.run([b"fine", b"fine"]))
        ready.send_bytes(b"working")
        with suppress(KeyboardInterrupt):
            list(transport.run([b"sleep", b"fine"]))
            return
        raise SystemExit(130)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once_though_a_worker_hangs(second: signal.Signals) -> None:
    with Lifeline() as lifeline, in_another_process(run_stuck) as (process, _):
        assert process.pid
        os.kill(process.pid, signal.SIGTERM)
        process.join(0.5)
        assert process.is_alive()  # the first one waits for the end of the round
        os.kill(process.pid, second)
        process.join(PATIENCE)
        assert process.exitcode == 130
        assert lifeline.all_ended()


def test_workers_leave_with_the_engine() -> None:
    with Lifeline() as lifeline:
        with forked(3) as transport:
            list(transport.run([b"fine"] * 3))
        assert lifeline.all_ended()


def test_workers_leave_after_an_error() -> None:
    with Lifeline() as lifeline:
        with pytest.raises(ZeroDivisionError), forked(3) as transport:
            next(transport.run([b"fine"] * 9))
            raise ZeroDivisionError
        assert lifeline.all_ended()


def run_and_pause(ready: Any) -> None:
    with forked(3) as transport:
        list(transport.run([b"fine"] * 3))
        ready.send_bytes(b"working")
        signal.pause()


def run_long_work(ready: Any) -> None:
    with Forked(Stuck(), 2) as transport:  # type: ignore[arg-type]
        list(transport.run([b"fine", b"fine"]))
        ready.send_bytes(b"working")
        list(transport.run([b"sleep", b"sleep"]))


@pytest.mark.parametrize("engine", [run_and_pause, run_long_work])
def test_workers_leave_when_the_engine_is_killed(engine: Callable[[Any], None]) -> None:
    """Whether they wait for work or are in the middle of it, such as a minute of personalisation."""
    with Lifeline() as lifeline, in_another_process(engine) as (process, _):
        time.sleep(0.2)
        process.kill()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        assert lifeline.all_ended()


def test_the_coordinator_computes_with_one_thread_while_workers_run():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with forked(2):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_private_store_is_made_before_workers_are_forked(tmp_path):
    """Several connections that each switch a new file to a write-ahead log find it locked."""
    path = tmp_path / "private.sqlite"
    probe = PROBES["pruned_experts"]
    Worker(tiny_parts(probe.factory(probe.config(), tiny_setup())), path, RUN_ID)
    with closing(sqlite3.connect(path)) as made:
        assert made.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert made.execute("SELECT COUNT(*) FROM state").fetchone() == (0,)
