"""The embedded engine: workers on this machine, one process per core, nothing to install or start.

Workers are forked, so data and models are shared with them and never copied or pickled; frames travel over pipes. Where
the system cannot fork, or for one worker, the work is done in this process. One thread per process, the coordinator's
included: threads inside small kernels gain little and collapse when anything else runs.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType

import torch

from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError


def default_workers() -> int:
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    return len(os.sched_getaffinity(0)) if can_fork and hasattr(os, "sched_getaffinity") else 1


def keep_freed_memory() -> None:
    """Ask the C library not to give large blocks back to the system after every use.

    A worker needs the same again in its next step, and pages that come anew are cleared anew.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: its own rules stand
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 256 << 20)


class InProcess:
    """One worker, in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> "InProcess":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        yield from ((index, self._worker.handle(frame)) for index, frame in enumerate(frames))


class Forked:
    """Several worker processes. Whoever is free takes the next frame; nothing depends on who that is."""

    def __init__(self, worker: Worker, num_workers: int) -> None:
        self._worker, self._num_workers = worker, num_workers

    def __enter__(self) -> "Forked":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self._num_workers):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=_serve, args=(self._worker, theirs, self._pipes), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker that reads the end of its pipe leaves
        for process in self._processes:
            process.join(timeout=None if kind is None else 1)
            if process.is_alive():
                process.terminate()
                process.join()
        torch.set_num_threads(self._threads)

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        waiting = list(enumerate(frames))[::-1]
        busy: dict[Connection, int] = {}
        for pipe in self._pipes[: len(waiting)]:
            self._give(pipe, waiting, busy)
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                index, answer = busy.pop(pipe), self._take(pipe)
                if waiting:
                    self._give(pipe, waiting, busy)
                yield index, answer

    def _give(self, pipe: Connection, waiting: list[tuple[int, bytes]], busy: dict[Connection, int]) -> None:
        index, frame = waiting.pop()
        try:
            pipe.send_bytes(frame)
        except OSError:
            raise self._died(pipe) from None
        busy[pipe] = index

    def _take(self, pipe: Connection) -> bytes:
        try:
            return pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._died(pipe) from None

    def _died(self, pipe: Connection) -> RunError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=5)
        return RunError(
            f"worker {process.pid} ended with exit code {process.exitcode} in the middle of its work (-9 is usually "
            "the system running out of memory). Run again to resume from the last checkpoint, if need be with fewer "
            "engine.workers."
        )


def _serve(worker: Worker, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """The life of a worker process. Ctrl-C is the parent's to handle: it ends the round cleanly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()  # else a sibling's copy would keep our pipe open after the parent is gone
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        try:
            frame = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(worker.handle(frame))


def start(worker: Worker, num_workers: int) -> InProcess | Forked:
    if num_workers > 1 and default_workers() == 1 and "fork" not in multiprocessing.get_all_start_methods():
        num_workers = 1
    return InProcess(worker) if num_workers == 1 else Forked(worker, num_workers)
