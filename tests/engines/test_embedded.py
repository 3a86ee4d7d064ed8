import multiprocessing
import os
import select
import signal
import sqlite3
import time
from contextlib import closing
from typing import Any

import pytest
import torch

from builders import tiny_federation
from contract.probes import PROBES
from fedmoe.engines.embedded import Forked, InProcess, start
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError

PATIENCE = 20.0  # seconds: a bound, not a delay


class Echo:
    """Stands where a Worker would: answers a frame with itself, unless the frame says how to die."""

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
def test_every_frame_is_answered_under_its_index(num_workers: int) -> None:
    frames = [f"frame {index}".encode() for index in range(7)]
    with start(Echo(), num_workers) as transport:  # type: ignore[arg-type]
        answers = dict(transport.run(frames))
        assert list(transport.run([])) == []
    assert answers == dict(enumerate(frames))


def test_one_worker_needs_no_process() -> None:
    assert isinstance(start(Echo(), 1), InProcess)  # type: ignore[arg-type]
    assert isinstance(start(Echo(), 2), Forked)  # type: ignore[arg-type]


def test_a_single_frame_is_answered_here_without_waking_anyone() -> None:
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
def test_the_death_of_a_worker_is_told(order: bytes, code: str) -> None:
    with pytest.raises(RunError, match=code), forked(2) as transport:
        list(transport.run([b"fine", order, b"fine", b"fine"]))


def test_a_worker_that_outlives_the_engine_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Slow(Echo):
        def handle(self, frame: bytes) -> bytes:
            time.sleep(0.3 if frame == b"slow" else 0)
            return super().handle(frame)

    with pytest.raises(RunError, match="exit code -9"), Forked(Slow(), 2) as transport:  # type: ignore[arg-type]
        list(transport.run([b"slow", b"kill"]))
    assert capfd.readouterr().err == ""


def test_a_worker_that_died_between_two_calls_is_told() -> None:
    with pytest.raises(RunError, match="exit code -15"), forked(2) as transport:
        list(transport.run([b"fine", b"fine"]))
        transport._processes[0].terminate()
        transport._processes[0].join(PATIENCE)
        list(transport.run([b"fine", b"fine"]))


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


def test_workers_leave_when_the_engine_is_killed() -> None:
    def engine(ready: Any) -> None:
        with forked(3) as transport:
            list(transport.run([b"fine"] * 3))
            ready.send_bytes(b"working")
            signal.pause()

    fork = multiprocessing.get_context("fork")
    with Lifeline() as lifeline:
        ours, theirs = fork.Pipe()
        process = fork.Process(target=engine, args=(theirs,))
        process.start()
        assert ours.poll(PATIENCE)
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
    Worker(PROBES["pruned_experts"].factory, tiny_federation(), path, 0)  # type: ignore[arg-type]
    with closing(sqlite3.connect(path)) as made:
        assert made.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert made.execute("SELECT COUNT(*) FROM state").fetchone() == (0,)
