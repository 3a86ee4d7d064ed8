"""What a node has replied already: a message that arrives twice is answered with the same bytes and changes nothing.

A message is known by its bytes, which name client, round, exchange and the state to start from, and by the attempt at
the run that it belongs to: a server that was killed and resumed begins a new attempt, and whatever an earlier one had
sent is refused from then on, so that it cannot overwrite what the new one came to.
"""

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from fedmoe.engines.replies import reported_error
from fedmoe.errors import MessageError
from fedmoe.framing import Bytes
from fedmoe.storage.files import make_private_folder, open_private

KEPT = 4  # replies; each is as large as an update
SCHEMA = """
CREATE TABLE IF NOT EXISTS attempt (number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS reply (place INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE, frame BLOB);
"""


class Journal:
    def __init__(self, path: Path) -> None:
        make_private_folder(path.parent)
        os.close(open_private(path, os.O_RDWR))
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)

    def begin(self, attempt: int) -> None:
        """Take part in this attempt at the run; an earlier one is refused."""
        (latest,) = self._db.execute("SELECT COALESCE(MAX(number), -1) FROM attempt").fetchone()
        if attempt < latest:
            raise MessageError(f"a message of attempt {attempt} at this run came too late: attempt {latest} has begun.")
        if attempt > latest:
            self._db.execute("INSERT INTO attempt VALUES (?)", (attempt,))

    def once(self, attempt: int, frame: Bytes, work: Callable[[Bytes], Bytes]) -> Bytes:
        """The reply to this frame: computed once, kept if it is no error, and given again."""
        digest = hashlib.blake2b(f"{attempt}/".encode() + bytes(frame), digest_size=32).digest()
        known = self._db.execute("SELECT frame FROM reply WHERE digest = ?", (digest,)).fetchone()
        if known:
            reply: bytes = known[0]
            return reply
        made = bytes(work(frame))
        if reported_error(made) is None:
            self._db.execute("INSERT INTO reply (digest, frame) VALUES (?, ?)", (digest, made))
            self._db.execute("DELETE FROM reply WHERE place <= (SELECT MAX(place) FROM reply) - ?", (KEPT,))
        return made

    def close(self) -> None:
        self._db.close()
