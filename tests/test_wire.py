import json
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fedmoe import framing, trees, wire
from fedmoe.algorithms import fine_tuned, local_global_mixture, local_only, specialist_mixture
from fedmoe.algorithms.fedavg import ServerState, Update
from fedmoe.core_types import Tensors
from fedmoe.errors import MessageError

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
    back = wire.decode(Sent, b"".join(wire.encode(sent(values))))
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
def test_what_is_not_declared_cannot_be_sent(thing):
    with pytest.raises(MessageError, match="not declared as a message"):
        wire.encode(thing)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_rejected(data):
    with pytest.raises(MessageError):
        wire.decode(Sent, data)


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 100])
def test_a_message_cut_short_is_rejected(cut):
    with pytest.raises(MessageError, match="is not safetensors"):
        wire.decode(Sent, b"".join(wire.encode(sent()))[:-cut])


def test_a_message_of_another_type_is_rejected():
    with pytest.raises(MessageError, match="Sent has no field 'num_examples'"):
        wire.decode(Sent, b"".join(wire.encode(Update({"w": torch.zeros(1)}, torch.tensor(1.0)))))
    with pytest.raises(MessageError, match="Sent lacks its tensor 'count'"):
        wire.decode(Sent, trees.to_bytes(Private({"w": torch.zeros(1)})))


@given(header=st.dictionaries(st.text(), JSON), blobs=st.lists(st.lists(st.binary(max_size=20), max_size=3)))
def test_a_frame_comes_out_as_it_went_in(header, blobs):
    assert wire.unpack(wire.pack(header, blobs)) == (header, [b"".join(parts) for parts in blobs])


def frame(head, body=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "big") + text + body


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not fit"),
        (b"1234567", "does not fit"),
        ((2**60).to_bytes(8, "big") + b"{}", "does not fit"),
        (frame(b" " * (framing.MAX_HEADER_BYTES + 1)), "is above"),
        (frame(b"\xff"), "cannot be read"),
        (frame(b"[" * 100_000), "cannot be read"),
        (frame(b'{"sizes":[%s],"header":{}}' % (b"9" * 5000)), "cannot be read"),
        (frame([]), "is not a header"),
        (frame({"sizes": []}), "is not a header"),
        (frame({"sizes": [], "header": []}), "is not a header"),
        (frame({"sizes": [], "header": {}, "more": 1}), "is not a header"),
        (frame({"sizes": {}, "header": {}}), "not counts"),
        (frame({"sizes": [64, -64, 64], "header": {}}, bytes(64)), "not counts"),
        (frame({"sizes": [True], "header": {}}, bytes(8)), "not counts"),
        (frame({"sizes": [8.0], "header": {}}, bytes(8)), "not counts"),
        (frame({"sizes": ["8"], "header": {}}, bytes(8)), "not counts"),
        (frame({"sizes": [2**60], "header": {}}, bytes(8)), "cut or joined"),
        (frame({"sizes": [8], "header": {}}, bytes(7)), "cut or joined"),
        (frame({"sizes": [], "header": {}}, bytes(8)), "cut or joined"),
    ],
)
def test_what_is_not_a_frame_is_rejected(data, reason):
    with pytest.raises(MessageError, match=f"bytes are not a frame: .*{reason}"):
        wire.unpack(data)


@given(st.binary(max_size=100) | JSON.map(lambda head: frame({"sizes": head, "header": head}, bytes(8))))
def test_any_bytes_are_a_frame_or_a_message_error(data):
    try:
        header, blobs = wire.unpack(data)
    except MessageError:
        return
    assert isinstance(header, dict) and sum(len(blob) for blob in blobs) <= len(data)


def test_blobs_start_where_any_number_may():
    """Tensors are read where they lie in a frame."""
    frame = wire.pack({"odd": "x"}, [[b"abc"], [b"d", b"ef"], [b"g"]])
    start = memoryview(frame)
    _, blobs = wire.unpack(frame)
    found = [bytes(start).index(bytes(blob), 8) for blob in blobs]
    assert bytes(start[found[0] : found[0] + 3]) == b"abc" and all(at % 8 == 0 for at in found)


def test_half_precision_of_either_kind_survives_the_wire():
    for dtype in (torch.bfloat16, torch.float16):
        sent = Sent({"w": torch.tensor([1.5, -2.0], dtype=dtype)}, torch.zeros(()))
        assert torch.equal(wire.decode(Sent, b"".join(wire.encode(sent))).model["w"], sent.model["w"])


@wire.message(experts="models", expert_ids="ids")
class Held(NamedTuple):
    models: Tensors
    ids: Tensor
    phi: Tensor


def test_experts_side_by_side_are_named_one_by_one():
    named = {"ids": torch.tensor([2, 0]), "models/w": torch.arange(6.0).view(2, 3), "phi": torch.zeros(1)}
    apart = wire.by_expert(Held, named)
    assert sorted(apart) == ["ids", "models/0/w", "models/2/w", "phi"]
    assert apart["models/2/w"].tolist() == [0, 1, 2] and apart["models/0/w"].tolist() == [3, 4, 5]


def test_names_mean_nothing_where_no_experts_are_declared():
    named = {"experts/w": torch.zeros(2, 3), "expert_ids": torch.tensor([0, 0])}
    assert wire.by_expert(Sent, named) is named and wire.expert_fields(Sent) is None
    assert wire.expert_fields(Held) == ("models", "ids")


def test_a_declaration_of_experts_names_fields():
    with pytest.raises(MessageError, match="Sent has no field 'ids', which @message names"):
        wire.message(experts="model", expert_ids="ids")(Sent)


@pytest.mark.parametrize(
    ("ids", "experts", "words"),
    [
        (torch.tensor([0, 0]), torch.zeros(2), "each expert once"),
        (torch.tensor([[0, 1]]), torch.zeros(2), "not torch.int64"),
        (torch.tensor([0.0, 1.0]), torch.zeros(2), "not torch.int64"),
        (torch.tensor([0, 1]), torch.zeros(3), "each of 2 ids"),
        (torch.tensor([0, 1]), torch.zeros(()), "each of 2 ids"),
    ],
)
def test_experts_that_cannot_be_distinguished_are_rejected(ids, experts, words):
    with pytest.raises(MessageError, match=words):
        wire.by_expert(Held, {"ids": ids, "models/w": experts})
    with pytest.raises(MessageError, match="it lacks 'ids', the ids of its experts"):
        wire.by_expert(Held, {"models/w": experts})


def test_a_reply_is_an_update_and_a_report_and_nothing_else():
    update, report = sent((1.0, 2.0)), sent((3.0,))
    first, second = wire.decode_reply(b"".join(wire.encode_reply(update, report)))
    assert same_tensors(first, trees.to_named(update)) and same_tensors(second, trees.to_named(report))
    for pair in ((Private({}), report), (update, Private({}))):
        with pytest.raises(MessageError, match="not declared as a message"):
            wire.encode_reply(*pair)
    for unknown in ("weights", "state/w", "update"):
        with pytest.raises(MessageError, match=f"a reply holds '{unknown}'"):
            wire.decode_reply(save({unknown: torch.zeros(1)}))


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
