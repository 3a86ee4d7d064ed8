import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import tiny_federation
from fedmoe.clients.facts import _ranges, facts_of, federation_without_data, read_facts
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.clients.own_table import federation_from_table
from fedmoe.errors import RunError


def through_json(federation):
    return federation_without_data(read_facts(json.loads(json.dumps(facts_of(federation).as_json())), "here"))


def test_all_that_is_no_record_comes_back():
    federation = tiny_federation()
    again = through_json(federation)
    for name in (
        "num_clients",
        "num_unseen",
        "num_classes",
        "input_shape",
        "names",
        "vocabulary_size",
        "pooled",
        "target_shape",
    ):
        assert getattr(again, name) == getattr(federation, name)
    assert again.participants.tolist() == federation.participants.tolist()
    assert again.input_dtype == torch.float32 and not len(again.global_test.y)


def test_the_schema_of_a_table_comes_back():
    rows = [{"ward": "ab"[n % 2], "age": n, "sex": "fm"[n % 2], "ill": "no" if n > 9 else "yes"} for n in range(20)]
    federation = federation_from_table(rows, client="ward", label="ill")
    again = through_json(federation)
    assert again.table == federation.table and again.class_names == ("no", "yes") and again.names == ["a", "b"]
    assert torch.equal(again.table.encode(rows[:3]), federation.table.encode(rows[:3]))


@given(st.sets(st.integers(0, 30)))
def test_ids_come_back_from_their_ranges(ids):
    wanted = np.array(sorted(ids), dtype=np.int64)
    found = [number for first, last in _ranges(wanted) for number in range(first, last + 1)]
    assert found == wanted.tolist()


@pytest.mark.parametrize("change", [{"num_clients": "many"}, {"input_dtype": "float99"}, {"names": 3}])
def test_what_is_not_as_a_run_wrote_it_is_refused(change):
    with pytest.raises(RunError, match="here is not as a run wrote it"):
        read_facts({**facts_of(tiny_federation()).as_json(), **change}, "here")


def test_a_regression_stays_one():
    x = torch.randn(10, 4)
    again = through_json(federation_from_clients({"a": (x, x[:, :2]), "b": (x, x[:, :2])}, task="regression"))
    assert (again.task, again.target_shape, again.num_classes) == ("regression", (2,), 0)
