"""Private state of clients, on the client's side only: by client *and* version, in one SQLite file.

One file for a million clients, safe under several workers and a killed process. The file belongs to one run, and every
row carries a digest: a state that is missing, altered or another run's is refused, never replaced by a fresh one.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from fedmoe import trees
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import decode_tensors
from fedmoe.errors import RunError
from fedmoe.storage.files import FILE_MODE, explained, make_private_folder, open_private

T = TypeVar("T")

BUSY_SECONDS = 60.0  # how long a worker waits while another one writes
SUPERSEDED_KINDS = ("client", "personal")  # of which a newer version takes the older one's place
REMEDY = "Put the file of this run back, or delete it and run again: the rounds are then computed again."

# A table with row ids: so its index holds keys only, and to look for a row reads no state.
SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (run_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS state (
    kind TEXT, client INTEGER, version INTEGER, digest BLOB, tensors BLOB, PRIMARY KEY (kind, client, version)
);
"""


class PrivateStore:
    """`kind` separates what may influence messages ("client") from what never does ("personal", "final")."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.run_id = path, run_id
        make_private(path)
        with self._explained("cannot be opened as the store of private state"):
            self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            with self._explained("cannot be opened as the store of private state"):
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA temp_store = MEMORY")  # nothing private in /tmp
                self._bind()
        except RunError:
            self._db.close()
            raise

    def load(self, kind: str, tree_type: type[T], client: ClientId, version: int) -> T:
        """The state of exactly this version."""
        return trees.from_named(tree_type, decode_tensors(self.read(kind, client, version)))

    def save(self, kind: str, states: Mapping[ClientId, Tree], version: int) -> None:
        """All states of a cohort, or none of them."""
        self.write(kind, {client: trees.to_bytes(state) for client, state in states.items()}, version)

    def read(self, kind: str, client: ClientId, version: int) -> bytes:
        wanted = (kind, client, version)
        with self._explained(f"gave no {kind} state of client {client}"):
            row = self._db.execute(
                "SELECT digest, tensors FROM state WHERE kind = ? AND client = ? AND version = ?", wanted
            ).fetchone()
        if row is None:
            raise RunError(f"{self.path} lacks the {kind} state of client {client} at version {version}. {REMEDY}")
        digest, tensors = row
        if not isinstance(tensors, bytes) or digest != self._digest(*wanted, tensors):
            raise RunError(
                f"{self.path}: the {kind} state of client {client} at version {version} is damaged. {REMEDY}"
            )
        return tensors

    def write(self, kind: str, blobs: Mapping[ClientId, bytes], version: int) -> None:
        rows = [(kind, client, version, self._digest(kind, client, version, b), b) for client, b in blobs.items()]
        with self._transaction(f"could not take the private state of clients {sorted(blobs)}"):
            self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?, ?)", rows)

    def have(self, kind: str, client_versions: Mapping[ClientId, int]) -> set[ClientId]:
        """Those of the clients whose state of exactly this version is there. Reads keys only, not the states."""
        query = "SELECT 1 FROM state WHERE kind = ? AND client = ? AND version = ?"
        with self._explained(f"cannot be searched for {kind} states"):
            return {
                client
                for client, version in client_versions.items()
                if self._db.execute(query, (kind, client, version)).fetchone()
            }

    def clients(self, kind: str, version: int) -> set[ClientId]:
        """Clients with a state of exactly this version."""
        with self._explained(f"cannot be searched for {kind} states"):
            rows = self._db.execute("SELECT client FROM state WHERE kind = ? AND version = ?", (kind, version))
            return {row[0] for row in rows}

    def drop_superseded(self, versions: Mapping[ClientId, tuple[int, int]]) -> None:
        """Delete states that no resume can ask for. Of each client (version, before): what is older than `before`, but
        not the one of `version`, which is the last that counted."""
        rows = [(kind, client, *these) for kind in SUPERSEDED_KINDS for client, these in versions.items()]
        with self._transaction("could not be relieved of old states"):
            self._db.executemany(
                "DELETE FROM state WHERE kind = ? AND client = ? AND version != ? AND version < ?", rows
            )

    def forget_from(self, version: int) -> None:
        """Delete whatever clients came to at this version or later, their final models and scores included."""
        with self._transaction("could not be relieved of later states"):
            self._db.execute("DELETE FROM state WHERE version >= ?", (version,))

    def copy_to(self, path: Path) -> None:
        """All of it, in a new file for its owner only."""
        make_private(path)
        with self._explained("could not be copied"), closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def close(self) -> None:
        with self._explained("could not be closed"):
            self._db.close()

    def _bind(self) -> None:
        """A new file becomes this run's; one with tables must be it already."""
        tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            self._db.executescript(SCHEMA)  # and begins the transaction that ends below
            if not self._db.execute("SELECT 1 FROM meta").fetchone():
                self._db.execute("INSERT INTO meta VALUES (?)", (self.run_id,))
            self._db.execute("COMMIT")
        elif tables == {"state"}:
            raise RunError(
                f"{self.path} was written by an earlier version of fedmoe, whose private states this one does not "
                "read. Finish the run with that version, or choose another run directory (--dir)."
            )
        owners = [row[0] for row in self._db.execute("SELECT run_id FROM meta")]
        if owners != [self.run_id]:
            whose = f"belongs to another run ({owners[0]})" if owners else "names no run: it is damaged"
            raise RunError(f"{self.path} {whose}; this is run {self.run_id}. {REMEDY}")
        self._db.execute("SELECT kind, client, version, digest, tensors FROM state LIMIT 0")  # else another program's

    def _digest(self, kind: str, client: ClientId, version: int, tensors: bytes) -> bytes:
        row = hashlib.blake2b(f"{self.run_id}/{kind}/{client}/{version}/".encode(), digest_size=16)
        row.update(tensors)
        return row.digest()

    @contextmanager
    def _transaction(self, what: str) -> Iterator[None]:
        with self._explained(what, "Earlier states are intact: free some space and run again to resume."):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self, what: str, remedy: str = REMEDY) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", "")
            if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                remedy = "Another program has it open: end that one, then run again to resume."
            elif code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
                remedy = "Check that you own it, can write it, and may open more files (ulimit -n); then run again."
            elif code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                remedy = REMEDY
            raise RunError(f"{self.path} {what}: {error}. {remedy}") from error


def make_private(path: Path) -> None:
    """For its owner only, before SQLite opens it: its log and index files take over the mode."""
    try:
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link, which is not followed: remove it.")
        if path.is_dir():
            raise RunError(f"{path} is a folder, where the file of private states should be. {REMEDY}")
        if path.exists():
            # Not by a descriptor: to close one would give up the locks of this process's other connections.
            path.chmod(FILE_MODE)
        else:
            make_private_folder(path.parent)
            os.close(open_private(path, os.O_RDWR))
    except OSError as error:
        reason, remedy = explained(error)
        raise RunError(
            f"{path} cannot be opened as the store of private state: {reason}. To go on, {remedy}."
        ) from error
