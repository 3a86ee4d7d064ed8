"""The events of a run, one JSON object per line, with a running digest that checkpoints rely on.

A resumed run goes on from the length that its checkpoint names: what was written after it will be computed again. So
events need not reach the disk one by one (a sync costs milliseconds), but before the checkpoint that relies on them.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedmoe.storage.files import open_private, read_bytes, sync_folder, unwritable

DIGEST_SIZE = 16


class MetricsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._length: int | None = None  # unknown until the first use
        self._digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
        self._synced = True

    def append(self, events: list[dict[str, Any]]) -> None:
        """All of them in one write, or none."""
        length = self._known_length()
        lines = "".join(json.dumps(event) + "\n" for event in events).encode()
        try:
            descriptor = open_private(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                _write_or_undo(descriptor, lines, length)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._digest.update(lines)
        self._length, self._synced = length + len(lines), False

    def read(self, length: int | None = None) -> list[dict[str, Any]]:
        """Those of the first `length` bytes, or all, up to the first line that is not whole: a process that was killed
        may leave half of one."""
        events: list[dict[str, Any]] = []
        for line in self._content()[:length].split(b"\n")[:-1]:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not isinstance(event, dict):
                break
            events.append(event)
        return events

    def state(self) -> tuple[int, str]:
        """(length in bytes, digest) of what is on disk for good; at a cost that does not grow with the file."""
        self.sync()
        return self._known_length(), self._digest.hexdigest()

    def sync(self) -> None:
        if self._synced:
            return
        try:
            descriptor = open_private(self.path, os.O_WRONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._synced = True

    def check(self, length: int, digest: str) -> str | None:
        """Why the file is not one that begins with these bytes, or None."""
        content = self._content()
        if len(content) < length:
            return f"relies on {length} bytes of {self.path.name}, which has {len(content)}"
        if hashlib.blake2b(content[:length], digest_size=DIGEST_SIZE).hexdigest() != digest:
            return f"relies on {self.path.name} as it was; its first {length} bytes have changed since"
        return None

    def truncate(self, length: int) -> None:
        """Drop what follows the first `length` bytes; makes the file if it is missing."""
        content = self._content()[:length]
        try:
            descriptor = open_private(self.path, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, len(content))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._start_from(content)

    def _known_length(self) -> int:
        if self._length is None:
            self._start_from(self._content())
        assert self._length is not None
        return self._length

    def _start_from(self, content: bytes) -> None:
        self._synced = True
        self._length, self._digest = len(content), hashlib.blake2b(content, digest_size=DIGEST_SIZE)

    def _content(self) -> bytes:
        try:
            return read_bytes(self.path)
        except FileNotFoundError:
            return b""


def _write_or_undo(descriptor: int, lines: bytes, length: int) -> None:
    try:
        left = memoryview(lines)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, length)  # half a line would be in the way of the next one
        raise
