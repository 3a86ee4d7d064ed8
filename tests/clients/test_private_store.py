import os
import shutil
import sqlite3
from contextlib import closing
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe.clients import private_store
from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import Tensors
from fedmoe.errors import RunError

RUN, OTHER = "a" * 32, "b" * 32
PAGE = 4096


class State(NamedTuple):
    model: Tensors
    steps: Tensor


def state(value, size=2):
    return State({"fc.weight": torch.full((size, 2), float(value))}, torch.tensor(value))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "private.sqlite"


@pytest.fixture
def store(path):
    opened = PrivateStore(path, RUN)
    yield opened
    opened.close()


def steps(store, client, version, kind="client"):
    return int(store.load(kind, State, client, version).steps)


def written(path, num_clients=40, size=200):
    """A store of many pages, closed, so that all is in one file."""
    with closing(PrivateStore(path, RUN)) as store:
        store.save("client", {client: state(client, size) for client in range(num_clients)}, 1)
        store.save("final", {client: state(client, size) for client in range(num_clients)}, 2)


def test_a_state_comes_back_as_it_was(store):
    store.save("client", {3: state(7)}, 1)
    found = store.load("client", State, 3, 1)
    assert torch.equal(found.model["fc.weight"], state(7).model["fc.weight"]) and found.steps == 7


def test_exactly_the_version_that_was_asked_for_is_loaded(store):
    for version in (1, 2, 5):
        store.save("client", {0: state(10 * version)}, version)
    assert [steps(store, 0, version) for version in (1, 2, 5)] == [10, 20, 50]
    store.save("client", {0: state(21)}, 2)  # a round that is computed again
    assert [steps(store, 0, version) for version in (1, 2, 5)] == [10, 21, 50]


@pytest.mark.parametrize(("client", "version"), [(0, 3), (0, 0), (1, 2)])
def test_a_missing_state_is_never_replaced_by_another(store, client, version):
    store.save("client", {0: state(1)}, 2)
    with pytest.raises(RunError, match=f"lacks the client state of client {client} at version {version}.*delete it"):
        store.load("client", State, client, version)


def test_clients_and_kinds_do_not_mix(store):
    store.save("client", {0: state(1)}, 1)
    store.save("personal", {0: state(2), 1: state(3)}, 1)
    assert steps(store, 0, 1) == 1 and steps(store, 0, 1, "personal") == 2 and steps(store, 1, 1, "personal") == 3
    assert store.have("client", {0: 1, 1: 1}) == {0}


def test_what_is_there_is_known_without_reading_it(store):
    store.save("client", {0: state(1), 1: state(1)}, 4)
    store.save("client", {1: state(1), 2: state(1)}, 5)
    assert store.have("client", {0: 4, 1: 5, 2: 4, 3: 4}) == {0, 1}
    assert store.have("client", {}) == set() == store.have("final", {0: 4})
    assert store.clients("client", 4) == {0, 1} and store.clients("client", 5) == {1, 2}
    plan = store._db.execute("EXPLAIN QUERY PLAN SELECT 1 FROM state WHERE kind = '' AND client = 1 AND version = 1")
    assert "COVERING INDEX" in plan.fetchone()[3]


def test_older_versions_are_dropped_client_by_client(store):
    for version in (1, 3, 4, 6):
        store.save("client", {0: state(version), 1: state(version)}, version)
        store.save("personal", {0: state(version)}, version)
    store.save("final", {0: state(9)}, 1)
    store.drop_superseded({0: (4, 5), 7: (100, 200)})
    versions = dict.fromkeys(range(2), 0)
    left = {kind: [v for v in range(8) if store.have(kind, {0: v})] for kind in ("client", "personal", "final")}
    assert left == {"client": [4, 6], "personal": [4, 6], "final": [1]}
    assert all(store.have("client", versions | {1: version}) == {1} for version in (1, 3, 4, 6))


def test_states_that_never_counted_are_dropped_too(store):
    for version in (2, 3, 5, 7):
        store.save("client", {0: state(version), 1: state(version)}, version)
    store.drop_superseded({0: (3, 7), 1: (0, 7)})
    left = {client: [v for v in range(9) if store.have("client", {client: v})] for client in (0, 1)}
    assert left == {0: [3, 7], 1: [7]}


def test_later_states_of_every_kind_are_forgotten(store):
    for kind in ("client", "personal", "final", "scores"):
        for version in (2, 3, 4):
            store.save(kind, {0: state(version)}, version)
    store.forget_from(3)
    assert all(
        [v for v in range(6) if store.have(kind, {0: v})] == [2] for kind in ("client", "personal", "final", "scores")
    )


def test_a_cohort_is_written_as_a_whole_or_not_at_all(path, store):
    store.save("client", {0: state(1), 1: state(1)}, 1)
    with closing(sqlite3.connect(path)) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON state WHEN NEW.client = 1 BEGIN SELECT RAISE(FAIL, 'full'); END"
        )
        other.commit()
    with pytest.raises(RunError, match=r"clients \[0, 1\]: full.*Earlier states are intact"):
        store.save("client", {0: state(2), 1: state(2)}, 2)
    assert store.have("client", {0: 2, 1: 2}) == set() and steps(store, 0, 1) == 1 == steps(store, 1, 1)
    store.save("client", {0: state(3)}, 3)  # and it goes on
    assert steps(store, 0, 3) == 3


def test_states_outlive_the_process_that_wrote_them(path, store):
    store.save("final", {4: state(1), 2: state(1)}, 6)
    with closing(PrivateStore(path, RUN)) as second:  # while the first is open: several workers share the file
        assert second.clients("final", 6) == {2, 4}
        assert second.clients("client", 0) == set()


class TestBelongingToARun:
    def test_the_store_of_another_run_is_refused_and_left_alone(self, path):
        written(path)
        before = path.read_bytes()
        with pytest.raises(RunError, match=f"belongs to another run.*{RUN}.*this is run {OTHER}.*delete it"):
            PrivateStore(path, OTHER)
        assert path.read_bytes() == before

    def test_a_row_of_another_run_is_refused(self, tmp_path, path, store):
        with closing(PrivateStore(tmp_path / "other.sqlite", OTHER)) as other:
            other.save("client", {0: state(1)}, 1)
        store._db.execute("ATTACH ? AS other", (str(tmp_path / "other.sqlite"),))
        store._db.execute("INSERT INTO state SELECT * FROM other.state")
        with pytest.raises(RunError, match="the client state of client 0 at version 1 is damaged"):
            store.load("client", State, 0, 1)

    def test_a_store_that_names_no_run_is_damaged(self, path):
        written(path)
        with closing(sqlite3.connect(path)) as db:
            db.execute("DELETE FROM meta")
            db.commit()
        with pytest.raises(RunError, match="names no run: it is damaged"):
            PrivateStore(path, RUN)

    def test_a_store_of_an_earlier_version_is_refused(self, path):
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE state (kind TEXT, client INTEGER, round INTEGER, tensors BLOB)")
            db.commit()
        with pytest.raises(RunError, match=r"was written by an earlier version of fedmoe.*--dir"):
            PrivateStore(path, RUN)

    def test_the_database_of_another_program_is_refused(self, path):
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE songs (title TEXT)")
            db.commit()
        with pytest.raises(RunError, match="cannot be opened as the store of private state: no such table"):
            PrivateStore(path, RUN)


class TestDamage:
    @pytest.mark.parametrize("change", ["client = 1 - client", "version = 9", "kind = 'personal'", "digest = x'00'"])
    def test_a_row_that_was_moved_or_altered_is_refused(self, store, change):
        store.save("client", {0: state(1)}, 1)
        store._db.execute(f"UPDATE state SET {change}")
        kind, client, version = store._db.execute("SELECT kind, client, version FROM state").fetchone()
        with pytest.raises(RunError, match=f"client {client} at version {version} is damaged"):
            store.load(kind, State, client, version)

    def test_a_single_flipped_bit_of_a_state_is_found(self, store):
        store.save("client", {0: state(1)}, 1)
        (content,) = store._db.execute("SELECT tensors FROM state").fetchone()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            store._db.execute("UPDATE state SET tensors = ?", (bytes(flipped),))
            with pytest.raises(RunError, match="damaged"):
                store.load("client", State, 0, 1)

    def test_a_page_of_zeros_is_said_or_changes_nothing(self, path):
        """Wherever it is: each state comes back as it was saved, or is refused with a sentence."""
        written(path, num_clients=6, size=700)  # so large that a state needs several pages
        content = path.read_bytes()
        outcomes = set()
        for page in range(len(content) // PAGE):
            path.write_bytes(content[: page * PAGE] + bytes(PAGE) + content[(page + 1) * PAGE :])
            outcomes |= {self.use(path, "client", 1, client) for client in (0, 3)}
            outcomes.add(self.use(path, "final", 2, 5))
            for leftover in path.parent.glob("private.sqlite-*"):
                leftover.unlink()
        assert outcomes == {"as saved", "said"}

    def use(self, path, kind, version, client):
        try:
            with closing(PrivateStore(path, RUN)) as store:
                store.clients(kind, version)
                store.have(kind, {client: version})
                found = store.load(kind, State, client, version)
                assert found.steps == client and (found.model["fc.weight"] == client).all()
                store.save("client", {client: state(1)}, 5)
                store.drop_superseded({client: (5, 6)})
                return "as saved"
        except RunError as error:
            assert "private.sqlite" in str(error)
            return "said"

    @pytest.mark.parametrize("use", ["load", "save", "have", "clients", "drop_superseded"])
    def test_a_malformed_database_is_said_by_every_method(self, path, use):
        written(path)
        with closing(PrivateStore(path, RUN)) as store:
            content = path.read_bytes()
            path.write_bytes(content[:PAGE] + b"\xff" * (len(content) - PAGE))
            calls = {
                "load": lambda: store.load("client", State, 3, 1),
                "save": lambda: store.save("client", {3: state(1)}, 2),
                "have": lambda: store.have("client", {3: 1}),
                "clients": lambda: store.clients("client", 1),
                "drop_superseded": lambda: store.drop_superseded({3: (9, 10)}),
            }
            with pytest.raises(RunError, match=r"private.sqlite .*malformed.*delete it and run again"):
                calls[use]()

    @pytest.mark.parametrize("content", [b"these are no tables" * 100, bytes(3 * PAGE)])
    def test_a_file_that_is_no_database_is_refused(self, path, content):
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"private.sqlite cannot be opened as the store of private state"):
            PrivateStore(path, RUN)

    def test_an_emptied_file_is_a_new_store_that_lacks_every_state(self, path):
        written(path)
        path.write_bytes(b"")
        with closing(PrivateStore(path, RUN)) as store:
            assert store.have("client", dict.fromkeys(range(40), 1)) == set()

    def test_a_folder_in_the_place_of_the_file_is_said(self, path):
        path.mkdir()
        with pytest.raises(RunError, match="is a folder, where the file of private states should be"):
            PrivateStore(path, RUN)

    def test_a_file_in_the_place_of_the_folder_is_said(self, tmp_path):
        (tmp_path / "clients").write_text("")
        with pytest.raises(RunError, match="a file is where a folder should be"):
            PrivateStore(tmp_path / "clients" / "private.sqlite", RUN)

    def test_a_locked_store_is_said(self, path, monkeypatch):
        monkeypatch.setattr(private_store, "BUSY_SECONDS", 0.05)
        with closing(PrivateStore(path, RUN)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(RunError, match=r"locked.*Another program has it open"):
                store.save("client", {0: state(1)}, 1)
            other.execute("ROLLBACK")
            store.save("client", {0: state(1)}, 1)

    def test_a_store_that_cannot_be_written_is_said(self, store):
        store._db.execute("PRAGMA query_only = ON")
        with pytest.raises(RunError, match=r"attempt to write a readonly database.*Check that you own it"):
            store.save("client", {0: state(1)}, 1)

    def test_a_closed_store_is_said(self, path):
        store = PrivateStore(path, RUN)
        store.close()
        with pytest.raises(RunError, match="closed database"):
            store.have("client", {0: 1})


class TestForTheOwnerOnly:
    @pytest.mark.parametrize("umask", [0o000, 0o022])
    def test_the_file_its_log_and_its_folder(self, tmp_path, umask):
        before = os.umask(umask)
        try:
            store = PrivateStore(tmp_path / "clients" / "private.sqlite", RUN)
            store.save("client", {0: state(1)}, 1)
        finally:
            os.umask(before)
        folder = tmp_path / "clients"
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == dict.fromkeys(("private.sqlite", "private.sqlite-wal", "private.sqlite-shm"), 0o600)
        assert folder.stat().st_mode & 0o777 == 0o700
        store.close()

    def test_a_file_that_was_open_to_others_is_closed_to_them(self, path):
        written(path)
        path.chmod(0o644)
        PrivateStore(path, RUN).close()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_a_link_is_not_followed(self, tmp_path, path):
        written(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RunError, match="symbolic link"):
            PrivateStore(path, RUN)


def test_the_write_ahead_log_of_another_run_changes_no_state(tmp_path, path):
    """SQLite replays a log that lies beside the file, whoever wrote it."""
    written(path)
    with closing(PrivateStore(tmp_path / "other.sqlite", OTHER)) as other:
        other.save("client", {client: state(99) for client in range(40)}, 1)
        shutil.copy(tmp_path / "other.sqlite-wal", tmp_path / "private.sqlite-wal")
    for client in range(40):
        assert TestDamage().use(path, "client", 1, client) in ("as saved", "said")
