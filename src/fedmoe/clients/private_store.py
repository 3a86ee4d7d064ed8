"""Private state of clients, on the client's side only: by client *and* round, in one SQLite file.

One file for a million clients, safe under several workers and a killed process. A replayed round starts from the state
that its first run started from, because rows of later rounds are invisible to it.
"""

import sqlite3
from pathlib import Path
from typing import TypeVar

from fedmoe import trees
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import decode_tensors
from fedmoe.errors import RunError

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS state (
    kind TEXT, client INTEGER, round INTEGER, tensors BLOB, PRIMARY KEY (kind, client, round)
) WITHOUT ROWID
"""


class PrivateStore:
    """`kind` separates what may influence messages ("client") from what never does ("personal")."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(SCHEMA)
        except sqlite3.Error as error:
            raise RunError(f"{path} cannot be opened as the store of private state: {error}.") from error

    def load(self, kind: str, tree_type: type[T], client: ClientId, before_round: int) -> T | None:
        """The newest state that was saved in an earlier round, or None."""
        row = self._db.execute(
            "SELECT tensors FROM state WHERE kind = ? AND client = ? AND round < ? ORDER BY round DESC LIMIT 1",
            (kind, client, before_round),
        ).fetchone()
        return trees.from_named(tree_type, decode_tensors(row[0])) if row else None

    def save(self, kind: str, states: dict[ClientId, Tree], round_number: int) -> None:
        """All states of a cohort, or none of them."""
        rows = [(kind, client, round_number, trees.to_bytes(state)) for client, state in states.items()]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise RunError(
                f"private state of clients {sorted(states)} could not be written: {error}. "
                "Earlier states are intact: free some space and run again to resume."
            ) from error

    def clients(self, kind: str, since_round: int) -> set[ClientId]:
        """Clients with a state of this round or a later one."""
        rows = self._db.execute("SELECT DISTINCT client FROM state WHERE kind = ? AND round >= ?", (kind, since_round))
        return {row[0] for row in rows}

    def forget_superseded(self, durable_round: int) -> None:
        """Drop states that no resume can ask for: those older than a client's newest one up to a durable checkpoint."""
        self._db.execute(
            "DELETE FROM state WHERE round < (SELECT MAX(round) FROM state AS newer WHERE newer.kind = state.kind "
            "AND newer.client = state.client AND newer.round <= ?)",
            (durable_round,),
        )

    def close(self) -> None:
        self._db.close()
