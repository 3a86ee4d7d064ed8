from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmoe import trees, wire
from fedmoe.algorithms import fine_tuned, local_global_mixture, local_only, specialist_mixture
from fedmoe.algorithms.fedavg import ServerState, Update
from fedmoe.errors import MessageError
from fedmoe.vocabulary import Tensors

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@wire.message
class Sent(NamedTuple):
    model: Tensors
    count: Tensor


class Private(NamedTuple):
    model: Tensors


def sent(values=(1.0, 2.0)):
    return Sent({"fc.weight": torch.tensor(values)}, torch.tensor(3))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=5))
def test_a_message_comes_out_as_it_went_in(values):
    back = wire.decode(Sent, wire.encode(sent(values)))
    assert type(back) is Sent and torch.equal(back.model["fc.weight"], torch.tensor(values)) and back.count == 3


@pytest.mark.parametrize(
    "kind",
    [
        Private, ServerState, fine_tuned.PersonalState, specialist_mixture.PersonalState,
        local_global_mixture.PersonalState, local_only.PersonalState,
    ],
)  # fmt: skip
def test_private_states_have_no_encoder(kind):
    state = kind(*[{"w": torch.zeros(1)} for _ in kind._fields])
    with pytest.raises(MessageError, match=f"{kind.__name__} is not declared as a message"):
        wire.encode(state)


@pytest.mark.parametrize("thing", [{"w": torch.zeros(1)}, torch.zeros(1), (torch.zeros(1),), None])
def test_what_is_not_declared_is_refused(thing):
    with pytest.raises(MessageError, match="not declared as a message"):
        wire.encode(thing)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(MessageError):
        wire.decode(Sent, data)


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 100])
def test_a_message_cut_short_is_refused(cut):
    with pytest.raises(MessageError, match="is not safetensors"):
        wire.decode(Sent, wire.encode(sent())[:-cut])


def test_a_message_of_another_type_is_refused():
    with pytest.raises(MessageError, match="Sent has no field 'num_examples'"):
        wire.decode(Sent, wire.encode(Update({"w": torch.zeros(1)}, torch.tensor(1.0))))
    with pytest.raises(MessageError, match="Sent lacks its tensor 'count'"):
        wire.decode(Sent, trees.to_bytes(Private({"w": torch.zeros(1)})))


@given(header=st.dictionaries(st.text(), JSON), blobs=st.lists(st.binary(max_size=20)))
def test_a_frame_comes_out_as_it_went_in(header, blobs):
    assert wire.unpack(wire.pack(header, blobs)) == (header, blobs)


def test_half_precision_of_either_kind_survives_the_wire():
    for dtype in (torch.bfloat16, torch.float16):
        sent = Sent({"w": torch.tensor([1.5, -2.0], dtype=dtype)}, torch.zeros(()))
        assert torch.equal(wire.decode(Sent, wire.encode(sent)).model["w"], sent.model["w"])
