"""Frames that wait for a worker, and how often each was run again because its worker was lost."""

from collections import Counter
from collections.abc import Sequence

from fedmoe.encoding import Bytes
from fedmoe.errors import RunError


class Retries:
    """`retries` bounds it: a frame that kills every worker that takes it must end the run."""

    def __init__(self, frames: Sequence[Bytes], retries: int) -> None:
        self._frames, self._retries = frames, retries
        self._losses: Counter[int] = Counter()
        self.waiting = list(range(len(frames)))[::-1]  # the next one last

    def next(self) -> tuple[int, Bytes]:
        index = self.waiting.pop()
        return index, self._frames[index]

    def lost(self, index: int, how: str) -> None:
        """The worker of this frame is gone: it waits again, for another one, or the run ends."""
        self._losses[index] += 1
        if self._losses[index] > self._retries:
            raise RunError(
                f"{how}; its cohort was run {self._losses[index]} times, and engine.retries={self._retries}. Run again "
                "to resume from the last checkpoint, if need be with fewer engine.workers."
            )
        self.waiting.append(index)
