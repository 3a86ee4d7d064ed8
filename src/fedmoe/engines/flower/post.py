"""Frames to nodes and their replies, through a Flower grid, for a limited time.

The loop of `grid.send_and_receive`, with two differences: it looks for replies more often than every three seconds, and
hands each on as soon as it is there.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fedmoe.engines.extras import require
from fedmoe.engines.flower.records import to_frame, to_records
from fedmoe.engines.replies import shown_reason
from fedmoe.errors import MessageError
from fedmoe.framing import Bytes, pack, unpack

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two looks at what has arrived
ROOM = 64 << 20  # bytes that a reply may have at least, and eight times what was asked with
KINDS = {"exchange": "train", "personalize": "train", "score": "evaluate"}  # what Flower calls it; all else is a query


class Letter(NamedTuple):
    node: int
    frame: Bytes


class Post:
    """`envelope` goes with every message: the run, and which attempt at it this is."""

    def __init__(self, grid: Any, envelope: dict[str, Any]) -> None:
        self.grid, self.envelope = grid, envelope
        self._message = require("flwr.app", "flower").Message

    def send(self, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Bytes]]:
        """(key of the letter, reply) as replies arrive, until all are there or the time is over.

        Whatever a node sends is a frame in the end: an error is one that says so.
        """
        deadline = time.monotonic() + seconds
        waiting: dict[str, int] = {}
        for key, letter in letters.items():
            if name := self.push(letter, seconds):
                waiting[name] = key
        pause = FIRST_PAUSE
        while waiting and time.monotonic() < deadline:
            replies = self.pull(waiting, {name: letters[key] for name, key in waiting.items()})
            yield from ((waiting.pop(name), frame) for name, frame in replies)
            pause = FIRST_PAUSE if replies else min(1.5 * pause, LONGEST_PAUSE)
            if waiting:
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))

    def push(self, letter: Letter, seconds: float) -> str | None:
        """Send one letter; the name by which its reply is asked for, None if Flower did not take it."""
        return next((str(name) for name in self.grid.push_messages([self._sealed(letter, seconds)]) if name), None)

    def pull(self, names: Iterable[str], letters: Mapping[str, Letter]) -> list[tuple[str, Bytes]]:
        """What has arrived of the replies to these letters, by name. Waits for nothing."""
        if not (wanted := set(names)):
            return []
        found = [(reply.metadata.reply_to_message_id, reply) for reply in self.grid.pull_messages(wanted)]
        return [(name, self._opened(reply, ROOM + 8 * len(letters[name].frame))) for name, reply in found]

    def _sealed(self, letter: Letter, seconds: float) -> Any:
        work = unpack(letter.frame)[0].get("do")
        content = to_records(letter.frame, self.envelope)
        return self._message(content, letter.node, KINDS.get(str(work), "query"), ttl=seconds)

    def _opened(self, reply: Any, max_bytes: int) -> Bytes:
        if reply.has_error():
            return error_frame(f"Flower reports error {reply.error.code}: {reply.error.reason}")
        try:
            return to_frame(reply.content, max_bytes)[0]
        except MessageError as error:
            return error_frame(str(error))
        except Exception as error:  # of records of a kind that nobody thought of: what a node sent must not end the run
            return error_frame(f"{type(error).__name__}: {error}")


def error_frame(message: str, kind: str = "RunError") -> Bytes:
    """What a worker would reply, from whoever speaks in its place."""
    return pack({"error": kind, "message": shown_reason(message)})
