"""The embedded engine: workers on this machine, one process per core, nothing to install or start.

Workers are forked, so data and models are shared with them and never copied or pickled; frames travel over channels.
Where the system cannot fork, or for one worker, the work is done in this process. One thread per process, the
coordinator's included: threads inside small kernels gain little and collapse when anything else runs.

A worker process that is killed is replaced, and its cohort run again from the state it had: a frame names the versions
of the private states that it starts from, so running it again changes nothing.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import TracebackType

import torch

from fedmoe.assembly import Parts
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.channel import Channel, channel_pair
from fedmoe.engines.retries import Retries
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.interrupts import at_stop
from fedmoe.storage.files import explained

LEAVING_SECONDS = 5.0  # a worker that has nothing to do leaves in milliseconds


def default_workers() -> int:
    return len(os.sched_getaffinity(0)) if _can_fork() and hasattr(os, "sched_getaffinity") else 1


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

    trusted = True  # the worker is this program: an error that it reports is one of this run
    one_store = True

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

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> PersonalModel:
        return self._worker.personal_model(delivered, client, state, final)

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        yield from ((index, self._worker.handle(frame)) for index, frame in enumerate(frames))


class Forked:
    """Several worker processes. Whichever is free gets the next frame; a single frame is handled in this process.

    Nothing depends on which process that is.
    """

    trusted = True
    one_store = True

    def __init__(self, worker: Worker, num_workers: int, retries: int = 0) -> None:
        self._worker, self._num_workers, self._retries = worker, num_workers, retries
        self._channels: list[Channel] = []
        self._processes: list[ForkProcess] = []
        self._unread: list[Channel] = []  # whose reply nobody waited for
        self._while_open = ExitStack()

    def __enter__(self) -> "Forked":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        try:
            for _ in range(self._num_workers):
                self._start_worker()
        except OSError as error:
            self._end(patience=0)
            raise _not_started(self._num_workers, error) from error
        self._while_open.enter_context(at_stop(self._wake))
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._while_open.close()
        self._end(patience=LEAVING_SECONDS if kind is None else 0)

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> PersonalModel:
        return self._worker.personal_model(delivered, client, state, final)

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        if len(frames) == 1:  # nothing to share out: to wake another process would cost a small model's training
            yield 0, self._worker.handle(frames[0])
            return
        self._make_ready()
        work = Retries(frames, self._retries)
        busy: dict[Channel, int] = {}
        try:
            while work.waiting or busy:
                for channel in [channel for channel in self._channels if channel not in busy][: len(work.waiting)]:
                    self._send(channel, work, busy)
                ready = wait([channel.fileno() for channel in busy]) if busy else []
                for channel in [channel for channel in busy if channel.fileno() in ready]:
                    index = busy.pop(channel)
                    try:
                        reply = channel.receive()
                    except (EOFError, OSError):
                        work.lost(index, self._replace(channel))
                        continue
                    if work.waiting:  # before the caller works on the reply
                        self._send(channel, work, busy)
                    yield index, reply
        finally:
            self._unread += busy  # the caller may stop early: a late reply must not pass for one to a later frame

    def _make_ready(self) -> None:
        """Nobody owes a reply any more, and whoever died since the last call is replaced: that is no frame's doing."""
        while self._unread:
            channel = self._unread.pop()
            try:
                channel.receive()
            except (EOFError, OSError):
                self._replace(channel)
        for channel, process in zip(list(self._channels), list(self._processes), strict=True):
            if not process.is_alive():
                self._replace(channel)

    def _start_worker(self, place: int | None = None) -> None:
        """In the place of a worker that is gone, or as one more."""
        ours, theirs = channel_pair()
        if place is None:
            self._channels.append(ours)
        else:
            self._channels[place] = ours
        arguments = (self._worker, theirs, self._channels, os.getpid())
        process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        finally:
            theirs.close()
        if place is None:
            self._processes.append(process)
        else:
            self._processes[place] = process

    def _replace(self, channel: Channel) -> str:
        """Another process for the one behind this channel; how that one ended."""
        place = self._channels.index(channel)
        gone = self._processes[place]
        gone.join(LEAVING_SECONDS)
        gone.kill()  # where only its channel is gone
        gone.join(LEAVING_SECONDS)
        channel.close()
        self._worker.close()  # this process may have opened the store: a connection must not be carried across a fork
        try:
            self._start_worker(place)
        except OSError as error:
            raise _not_started(1, error) from error
        how = f"worker {gone.pid} ended with exit code {gone.exitcode} in the middle of its work"
        return f"{how} (-9 is usually the system running out of memory)"

    def _wake(self) -> None:
        """The round is to be ended: a worker that somebody stopped (SIGSTOP) would never end it."""
        for process in self._processes:
            with suppress(OSError):  # it is gone
                os.kill(process.pid or 0, signal.SIGCONT)

    def _end(self, patience: float) -> None:
        """A worker that reads the end of its channel leaves. One that does not in time, stopped or hung, is killed:
        it has nothing to tidy up, since its writes are transactions."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + patience
        try:
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second signal may arrive in the middle of a join
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.join(LEAVING_SECONDS)
        self._worker.close()
        torch.set_num_threads(self._threads)

    def _send(self, channel: Channel, work: Retries, busy: dict[Channel, int]) -> None:
        index, frame = work.next()
        try:
            channel.send(frame)
        except OSError:
            work.lost(index, self._replace(channel))
            return
        busy[channel] = index


def _not_started(count: int, error: OSError) -> RunError:
    reason, remedy = explained(error)
    return RunError(f"{count} worker processes could not be started: {reason}. To go on, {remedy}.")


def _serve(worker: Worker, channel: Channel, inherited: Sequence[Channel], parent: int) -> None:
    """The life of a worker process. Ctrl-C and SIGTERM, which may go to the whole group, are the parent's to handle:
    it ends the round cleanly."""
    _leave_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for other in inherited:
        other.close()  # else a sibling's copy would keep our channel open after the parent is gone
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.freeze()  # the collector need not look at what is shared with the parent: pages that it writes to are copied
    while True:
        try:
            frame = channel.receive()
        except (EOFError, OSError):
            return
        reply = worker.handle(frame)
        try:
            channel.send(reply)
        except OSError:  # the engine has ended meanwhile, and said why
            return
        del frame, reply  # or a large model stays in memory twice until the next reply is there


def _leave_with(parent: int) -> None:
    """Die when the parent dies, in the middle of work too (Linux; elsewhere a worker leaves when it next reads).

    Linux counts the thread that forked: an engine is opened and used in one thread.
    """
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this was set
        os._exit(1)


def open_transport(parts: Parts, store: Path, run_id: str) -> InProcess | Forked:
    """As many workers as the config says, by default one per core; one for a device, which they would only share."""
    wanted = parts.config.engine.workers or (default_workers() if parts.device.type == "cpu" else 1)
    return start(Worker(parts, store, run_id), wanted, parts.config.engine.retries)


def start(worker: Worker, num_workers: int, retries: int = 0) -> InProcess | Forked:
    return InProcess(worker) if num_workers == 1 or not _can_fork() else Forked(worker, num_workers, retries)


def _can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()
