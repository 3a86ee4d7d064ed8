import sqlite3
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe.clients.private_store import PrivateStore
from fedmoe.core_types import Tensors
from fedmoe.errors import RunError


class State(NamedTuple):
    model: Tensors
    steps: Tensor


def state(value):
    return State({"fc.weight": torch.full((2, 2), float(value))}, torch.tensor(value))


@pytest.fixture
def store(tmp_path):
    opened = PrivateStore(tmp_path / "private.sqlite")
    yield opened
    opened.close()


def newest(store, client, before_round, kind="client"):
    found = store.load(kind, State, client, before_round)
    return None if found is None else int(found.steps)


def test_a_state_comes_back_as_it_was(store):
    store.save("client", {3: state(7)}, 1)
    found = store.load("client", State, 3, 2)
    assert torch.equal(found.model["fc.weight"], state(7).model["fc.weight"]) and found.steps == 7


def test_the_replay_of_a_round_sees_the_state_before_it(store):
    store.save("client", {0: state(1)}, 1)
    store.save("client", {0: state(2)}, 2)
    store.save("client", {0: state(9)}, 5)
    assert [newest(store, 0, before) for before in (1, 2, 3, 5, 6)] == [None, 1, 2, 2, 9]
    store.save("client", {0: state(20)}, 2)  # the replay itself
    assert newest(store, 0, 3) == 20


def test_clients_and_kinds_do_not_mix(store):
    store.save("client", {0: state(1)}, 1)
    store.save("personal", {0: state(2), 1: state(3)}, 1)
    assert newest(store, 0, 9) == 1 and newest(store, 0, 9, "personal") == 2
    assert newest(store, 1, 9) is None and newest(store, 1, 9, "personal") == 3


def test_forgetting_keeps_what_a_resume_from_the_checkpoint_needs(store):
    for number in (1, 3, 4, 6):
        store.save("client", {0: state(number)}, number)
    store.save("client", {1: state(100)}, 1)
    store.save("personal", {0: state(50)}, 1)
    store.forget_superseded(4)
    assert [newest(store, 0, before) for before in (4, 5, 7)] == [None, 4, 6]
    assert newest(store, 1, 5) == 100  # its only one, however old
    assert newest(store, 0, 5, "personal") == 50


def test_forgetting_before_the_first_state_forgets_nothing(store):
    store.save("client", {0: state(5)}, 5)
    store.forget_superseded(3)
    assert newest(store, 0, 6) == 5


def test_a_cohort_is_written_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "private.sqlite"
    store = PrivateStore(path)
    store.save("client", {0: state(1), 1: state(1)}, 1)
    other = sqlite3.connect(path)
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON state WHEN NEW.client = 1 BEGIN SELECT RAISE(FAIL, 'full'); END"
    )
    other.commit()
    other.close()
    with pytest.raises(RunError, match=r"clients \[0, 1\] could not be written: full"):
        store.save("client", {0: state(2), 1: state(2)}, 2)
    assert newest(store, 0, 9) == 1 == newest(store, 1, 9)
    store.save("client", {0: state(3)}, 3)  # and it goes on
    assert newest(store, 0, 9) == 3
    store.close()


def test_states_outlive_the_process_that_wrote_them(tmp_path):
    first = PrivateStore(tmp_path / "private.sqlite")
    first.save("final", {4: state(1), 2: state(1)}, 6)
    first.save("final", {9: state(1)}, 5)
    second = PrivateStore(tmp_path / "private.sqlite")  # while the first is open: several workers share the file
    assert second.clients("final", 6) == {2, 4} and second.clients("final", 5) == {2, 4, 9}
    assert second.clients("client", 0) == set()
    first.close()
    second.close()


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "private.sqlite").write_bytes(b"these are no tables" * 100)
    with pytest.raises(RunError, match=r"private.sqlite cannot be opened"):
        PrivateStore(tmp_path / "private.sqlite")
