"""The embedded engine: workers on this machine, one process per core, nothing to install or start.

Workers are forked, so data and models are shared with them and never copied or pickled; frames travel over channels.
Where the system cannot fork, or for one worker, the work is done in this process. One thread per process, the
coordinator's included: threads inside small kernels gain little and collapse when anything else runs.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from types import TracebackType

import torch

from fedmoe.encoding import Bytes
from fedmoe.engines.channel import Channel, channel_pair
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
        self._worker.close()
        torch.set_num_threads(self._threads)

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        yield from ((index, self._worker.handle(frame)) for index, frame in enumerate(frames))


class Forked:
    """Several worker processes. Whoever is free takes the next frame, and a single one this process itself takes.

    Nothing depends on who that is.
    """

    def __init__(self, worker: Worker, num_workers: int) -> None:
        self._worker, self._num_workers = worker, num_workers

    def __enter__(self) -> "Forked":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        context = multiprocessing.get_context("fork")
        self._channels: list[Channel] = []
        self._processes = []
        for _ in range(self._num_workers):
            ours, theirs = channel_pair()
            self._channels.append(ours)
            process = context.Process(target=_serve, args=(self._worker, theirs, self._channels), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for channel in self._channels:
            channel.close()  # a worker that reads the end of its channel leaves
        for process in self._processes:
            process.join(timeout=None if kind is None else 1)
            if process.is_alive():
                process.terminate()
                process.join()
        self._worker.close()
        torch.set_num_threads(self._threads)

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        if len(frames) == 1:  # nothing to share out: to wake another process would cost a small model's training
            yield 0, self._worker.handle(frames[0])
            return
        waiting = list(enumerate(frames))[::-1]
        busy: dict[Channel, int] = {}
        for channel in self._channels[: len(waiting)]:
            self._give(channel, waiting, busy)
        while busy:
            ready = wait([channel.fileno() for channel in busy])
            for channel in [channel for channel in self._channels if channel in busy and channel.fileno() in ready]:
                index, answer = busy.pop(channel), self._take(channel)
                if waiting:
                    self._give(channel, waiting, busy)
                yield index, answer

    def _give(self, channel: Channel, waiting: list[tuple[int, Bytes]], busy: dict[Channel, int]) -> None:
        index, frame = waiting.pop()
        try:
            channel.send(frame)
        except OSError:
            raise self._died(channel) from None
        busy[channel] = index

    def _take(self, channel: Channel) -> Bytes:
        try:
            return channel.receive()
        except (EOFError, OSError):
            raise self._died(channel) from None

    def _died(self, channel: Channel) -> RunError:
        process = self._processes[self._channels.index(channel)]
        process.join(timeout=5)
        return RunError(
            f"worker {process.pid} ended with exit code {process.exitcode} in the middle of its work (-9 is usually "
            "the system running out of memory). Run again to resume from the last checkpoint, if need be with fewer "
            "engine.workers."
        )


def _serve(worker: Worker, channel: Channel, inherited: Sequence[Channel]) -> None:
    """The life of a worker process. Ctrl-C is the parent's to handle: it ends the round cleanly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()  # else a sibling's copy would keep our channel open after the parent is gone
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        try:
            frame = channel.receive()
        except (EOFError, OSError):
            return
        answer = worker.handle(frame)
        try:
            channel.send(answer)
        except OSError:  # the engine has ended meanwhile, and told why
            return


def start(worker: Worker, num_workers: int) -> InProcess | Forked:
    if num_workers > 1 and default_workers() == 1 and "fork" not in multiprocessing.get_all_start_methods():
        num_workers = 1
    return InProcess(worker) if num_workers == 1 else Forked(worker, num_workers)
