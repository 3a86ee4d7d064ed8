"""Ctrl-C and SIGTERM end a run cleanly, after the round and its checkpoint. A second one of either ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_at_stop: list[Callable[[], None]] = []


class StopRequest:
    """Remembers the signal that asked for the stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        for action in _at_stop:
            action()


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def at_stop(action: Callable[[], None]) -> Iterator[None]:
    """Called at the first signal, wherever the process is waiting just then."""
    _at_stop.append(action)
    try:
        yield
    finally:
        _at_stop.remove(action)
