"""The bytes are those of safetensors, in both directions, and nothing that is not is taken for tensors."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from fedmoe import encoding
from fedmoe.encoding import DTYPES, decode_tensors
from fedmoe.errors import MessageError


def encode_tensors(named, metadata=None):
    return b"".join(encoding.encode_tensors(named, metadata))


SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def named_tensors(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=5))
    tensors = {}
    for name in names:
        shape, dtype = draw(SHAPES), draw(st.sampled_from(list(DTYPES.values())))
        tensors[name] = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@settings(deadline=None)
@given(named_tensors())
def test_the_library_reads_what_we_write(named):
    assert same(load(encode_tensors(named)), named)


@settings(deadline=None)
@given(named_tensors())
def test_we_read_what_the_library_writes(named):
    assert same(decode_tensors(save(named)), named)


def test_metadata_is_written_where_the_library_looks_for_it(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_tensors({"a": torch.ones(2)}, {"note": "x"}))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"note": "x"}
    assert list(decode_tensors(path.read_bytes())) == ["a"]


def test_tensors_that_share_memory_or_lie_oddly_are_written_each_in_full():
    whole = torch.arange(12.0).reshape(3, 4)
    named = {"a": whole, "b": whole.T, "c": whole[0].expand(2, 4), "d": whole[:, 1]}
    assert same(decode_tensors(encode_tensors(named)), named)


def test_tensors_are_views_of_memory_that_can_be_written_and_copies_of_memory_that_cannot():
    data = encode_tensors({"a": torch.zeros(3)})
    writable = bytearray(data)
    decode_tensors(writable)["a"][0] = 1.0
    assert decode_tensors(writable)["a"].tolist() == [1.0, 0.0, 0.0]
    decode_tensors(data)["a"][0] = 1.0
    assert decode_tensors(data)["a"].tolist() == [0.0, 0.0, 0.0]


def message(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype="F32", shape=(1,), data_offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets), **more}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header does not fit"),
        (b"1234567", "header does not fit"),
        ((2**63).to_bytes(8, "little") + b"{}", "header does not fit"),
        (message(b"not json"), "cannot be read"),
        (message(b"[" * 100_000), "cannot be read"),
        (message([1]), "cannot be read"),
        (message({"a": 1}), "cannot be read"),
        (message({"a": entry(dtype="F8_E4M3")}, bytes(4)), "cannot be read"),
        (message({"a": entry(more=1)}, bytes(4)), "cannot be read"),
        (message({"a": entry(shape=(-1,), data_offsets=(4, 0))}), "no number of things"),
        (message({"a": entry(shape=(1.0,))}, bytes(4)), "no number of things"),
        (message({"a": entry(shape=(True,))}, bytes(4)), "no number of things"),
        (message({"a": entry(shape=(2,))}, bytes(4)), "does not fit F32"),
        (message({"a": entry(data_offsets=(0, 8))}, bytes(8)), "does not fit F32"),
        (message({"a": entry()}, bytes(3)), "4 bytes long, but 3"),
        (message({"a": entry()}, bytes(5)), "4 bytes long, but 5"),
        (message({"a": entry(data_offsets=(4, 8))}, bytes(8)), "does not start where"),
        (message({"a": entry(), "b": entry()}, bytes(8)), "does not start where"),
        (message({"a": entry("U8", (3,), (0, 3)), "b": entry("F32", (1,), (3, 7))}, bytes(7)), "does not fit F32"),
        (message({}, bytes(1)), "0 bytes long, but 1"),
    ],
)
def test_what_does_not_hold_together_is_refused(data, reason):
    with pytest.raises(MessageError, match=f"is not safetensors: .*{reason}"):
        decode_tensors(data)


@settings(deadline=None)
@given(st.data())
def test_a_message_with_one_byte_changed_is_read_or_refused(data):
    good = bytearray(encode_tensors({"a": torch.ones(2, 3), "b": torch.zeros((), dtype=torch.int64)}))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode_tensors(good)
    except MessageError:
        return
    assert sum(tensor.nbytes for tensor in read.values()) == 6 * 4 + 8
