from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Tensors
from fedmoe.errors import MessageError

NAMES = st.text(st.characters(categories=["L", "N"], include_characters="._- "), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(
        draw(DTYPES)
    )


TREES = st.recursive(tensors(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=6)
DICTS = st.dictionaries(NAMES, TREES, min_size=1, max_size=3)


class Gate(NamedTuple):
    weights: Tensors
    temperature: Tensor


class State(NamedTuple):
    experts: dict[str, Tensors]
    gate: Gate
    round: Tensor


def state(value=1.0):
    experts = {"0": {"fc.weight": torch.full((2, 3), value)}, "1": {"fc.weight": torch.zeros(2, 3)}}
    return State(experts, Gate({"bias": torch.ones(1)}, torch.tensor(0.5)), torch.tensor(7))


def same(one, other):
    a, b = trees.to_named(one), trees.to_named(other)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@settings(deadline=None)
@given(DICTS)
def test_names_lead_back_to_the_tree(tree):
    assert same(trees.nested(trees.to_named(tree)), tree)


@settings(deadline=None)
@given(DICTS, st.integers(1, 4))
def test_stacking_and_unstacking_gives_the_clients_back(tree, size):
    clients = [trees.tree_map(torch.clone, tree) for _ in range(size)]
    stacked = trees.stack(clients)
    assert all(leaf.shape[0] == size for leaf in trees.leaves(stacked))
    for s, one in enumerate(trees.unstack(stacked, size)):
        assert same(one, clients[s]) and same(trees.pick(stacked, s), clients[s])


def test_some_clients_are_taken_out_and_put_back():
    stacked = trees.stack([state(1), state(2), state(3)])
    some = trees.take(stacked, torch.tensor([0, 2]))
    assert same(trees.pick(some, 1), state(3)) and some.gate.temperature.shape == (2,)
    changed = trees.put(stacked, torch.tensor([2, 0]), some)
    assert [same(trees.pick(changed, s), state(value)) for s, value in enumerate((3, 2, 1))] == [True] * 3
    assert same(trees.pick(stacked, 0), state(1))


def test_a_cohort_that_shares_one_object_is_a_view_of_it():
    shared = state()
    stacked = trees.stack([shared] * 3)
    assert stacked.gate.temperature.shape == (3,) and type(stacked) is State
    assert stacked.round.data_ptr() == shared.round.data_ptr()
    assert trees.stack([state(1), state(2)]).experts["0"]["fc.weight"][1, 0, 0] == 2


def test_a_state_is_named_by_its_paths_and_read_back_with_its_types():
    named = trees.to_named(state())
    assert list(named) == [
        "experts/0/fc.weight",
        "experts/1/fc.weight",
        "gate/weights/bias",
        "gate/temperature",
        "round",
    ]
    back = trees.from_named(State, named)
    assert type(back) is State and type(back.gate) is Gate and same(back, state())


@pytest.mark.parametrize("name", ["a/b", "/", ""])
def test_a_name_that_could_not_be_read_back_is_not_written(name):
    with pytest.raises(MessageError, match=f"the name '{name}' is empty or holds a '/'"):
        trees.to_named({"a": {name: torch.zeros(1)}})


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("", "no field ''"),
        ("/", "no field ''"),
        ("experts", "does not fit it"),
        ("round/0", "does not fit it"),
        ("gate/temperature/x", "does not fit it"),
        ("gate", "does not fit it"),
        ("experts/", "an empty level"),
        ("experts//w", "an empty level"),
        ("experts/0//w", "an empty level"),
        ("experts/0", "lies within '0', which is a tensor itself"),
        ("experts/0/fc.weight/x", "lies within 'fc.weight', which is a tensor itself"),
        ("experts" + "/x" * 40_000, "more than 32"),
    ],
)
def test_odd_names_are_not_read(odd, reason):
    with pytest.raises(MessageError, match=reason):
        trees.from_named(State, {**trees.to_named(state()), odd: torch.zeros(1)})


@settings(deadline=None)
@given(st.lists(st.text("ab/", max_size=6), max_size=6))
def test_names_are_read_back_as_they_are_or_not_at_all(names):
    named = {name: torch.zeros(1) for name in names}
    try:
        tree = trees.nested(named)
    except MessageError:
        return
    assert trees.to_named(tree).keys() == named.keys()


def test_what_the_type_does_not_declare_is_not_read():
    named = trees.to_named(state())
    with pytest.raises(MessageError, match="State has no field 'secret'; it has experts, gate, round"):
        trees.from_named(State, {**named, "secret/x": torch.zeros(1)})
    with pytest.raises(MessageError, match="Gate has no field 'other'"):
        trees.from_named(State, {**named, "gate/other": torch.zeros(1)})
    with pytest.raises(MessageError, match="Gate lacks its tensor 'temperature'"):
        trees.from_named(State, {name: tensor for name, tensor in named.items() if name != "gate/temperature"})


def test_leaves_that_share_memory_can_be_written():
    weight = torch.arange(6.0).view(2, 3)
    assert len(trees.to_bytes({"a": weight, "b": weight, "c": weight.T, "d": weight[0].expand(4, 3)})) > 6 * 4 * 4
