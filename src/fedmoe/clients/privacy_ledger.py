"""What each client has spent of its privacy, in a file of its own beside the private states.

An entry and the reply that it pays for are written in one transaction, before anything is sent: so the ledger never
counts too little, and a question that is asked again gets the bytes that were sent before, not a fresh draw. A client's
secret is kept here too, and leaves as little as its states.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe.clients.private_store import BUSY_SECONDS, make_private
from fedmoe.core_types import ClientId
from fedmoe.errors import RunError
from fedmoe.noise import NoiseKey, NoiseSource
from fedmoe.private_steps import Charge

REMEDY = (
    "Put the file of this run back. Without it nobody knows what its clients have spent, so the run cannot go on; a "
    "new one in another directory (--dir) spends anew."
)
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (run_id TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS secrets (client INTEGER PRIMARY KEY, key BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    client INTEGER, number INTEGER, round INTEGER, charges TEXT, PRIMARY KEY (client, number)
);
CREATE TABLE IF NOT EXISTS replies (
    client INTEGER, request BLOB, round INTEGER, reply BLOB, PRIMARY KEY (client, request)
);
"""


class Paid(NamedTuple):
    """A reply, and what it costs."""

    request: bytes  # a digest of all that the reply depends on, records aside
    charges: Sequence[Charge]
    reply: bytes


class PrivacyLedger:
    """`facts` are what `fedmoe privacy` says besides: delta, the source of noise, why nothing is guaranteed."""

    def __init__(self, path: Path, run_id: str, facts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        make_private(path)
        with self._explained():
            self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # what is recorded is on disk before the reply leaves
            self._db.executescript(SCHEMA)
            if not self._db.execute("SELECT 1 FROM meta").fetchone():
                self._db.execute("INSERT INTO meta VALUES (?, ?)", (run_id, json.dumps(dict(facts or {}))))
            self._db.execute("COMMIT")
            owner, stored = self._db.execute("SELECT run_id, facts FROM meta").fetchone()
        if owner != run_id:
            self._db.close()
            raise RunError(f"{path} is the privacy ledger of another run ({owner}); this is run {run_id}. {REMEDY}")
        self.facts: dict[str, Any] = json.loads(stored)

    def key(self, client: ClientId, source: NoiseSource, seed: int) -> NoiseKey:
        """Of the client's noise: its own secret, drawn once, or one that derives from the run's seed."""
        if source == "seeded":
            return NoiseKey.of_seed(seed, client)
        with self._explained():
            self._db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (client, NoiseKey.fresh().key))
            (key,) = self._db.execute("SELECT key FROM secrets WHERE client = ?", (client,)).fetchone()
        return NoiseKey("secure", key)

    def charges(self, client: ClientId) -> list[Charge]:
        """All that this client was ever charged, in order."""
        query = "SELECT charges FROM entries WHERE client = ? ORDER BY number"
        with self._explained():
            rows = self._db.execute(query, (client,)).fetchall()
        return [Charge(*charge) for (text,) in rows for charge in json.loads(text)]

    def next_step(self, client: ClientId) -> int:
        """The number of the client's next noised step: as many as were charged before."""
        return sum(charge.steps for charge in self.charges(client) if charge.kind == "gradient")

    def reply(self, client: ClientId, request: bytes) -> bytes | None:
        """What was sent to this very question before, if it was."""
        query = "SELECT reply FROM replies WHERE client = ? AND request = ?"
        with self._explained():
            row = self._db.execute(query, (client, request)).fetchone()
        return None if row is None else bytes(row[0])

    def record(self, round_number: int, paid: Mapping[ClientId, Paid], keep_rounds: int) -> None:
        """All of it or nothing. Replies are kept for so many rounds: as long as a resume may ask again."""
        with self._explained():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for client, one in paid.items():
                    number = self._db.execute("SELECT COUNT(*) FROM entries WHERE client = ?", (client,)).fetchone()[0]
                    entry = (client, number, round_number, json.dumps(list(one.charges)))
                    self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", entry)
                    reply = (client, one.request, round_number, one.reply)
                    self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", reply)
                    old = (client, round_number - keep_rounds)
                    self._db.execute("DELETE FROM replies WHERE client = ? AND round < ?", old)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def clients(self) -> list[ClientId]:
        with self._explained():
            return [row[0] for row in self._db.execute("SELECT DISTINCT client FROM entries ORDER BY client")]

    def rounds(self) -> set[tuple[ClientId, int]]:
        """Who was charged in which round."""
        with self._explained():
            return set(self._db.execute("SELECT client, round FROM entries").fetchall())

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(f"the privacy ledger {self.path} cannot be used: {error}. {REMEDY}") from error


def ledger_beside(private_store: Path) -> Path:
    return private_store.with_name("privacy.sqlite")


def check_ledger(path: Path, run_id: str, sent: Sequence[tuple[ClientId, int]]) -> None:
    """Every round in which a client's update was accepted must have been charged: else this is another ledger."""
    if not sent:
        return
    if not path.exists():
        raise RunError(f"the privacy ledger {path} is missing, but clients have sent updates in this run. {REMEDY}")
    ledger = PrivacyLedger(path, run_id)
    try:
        missing = sorted(set(sent) - ledger.rounds())
    finally:
        ledger.close()
    if missing:
        client, number = missing[0]
        raise RunError(
            f"the privacy ledger {path} does not belong to this checkpoint: it has no entry of client {client} for "
            f"round {number}, in which it sent an update. {REMEDY}"
        )
