"""The bytes are those of safetensors, in both directions, and nothing that is not is taken for tensors."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from fedmoe import encoding
from fedmoe.encoding import DTYPES, MAX_CACHED_HEADER_BYTES, decode_tensors
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
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and raw(one[name]) == raw(other[name])
        for name in one
    )


def raw(tensor):
    """Its bytes: torch.equal does not know every type, and takes no NaN for itself."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


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


REJECTED = [
    (b"", "header does not fit"),
    (b"1234567", "header does not fit"),
    ((2**63).to_bytes(8, "little") + b"{}", "header does not fit"),
    (message(b"not json"), "cannot be read"),
    (message(b"[" * 100_000), "cannot be read"),
    (message([1]), "no JSON object"),
    (message({"a": 1}), "described by something else"),
    (message({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "does not have dtype, shape, data_offsets"),
    (message({"a": entry(dtype="F4", shape=(2,), data_offsets=(0, 1))}, bytes(1)), "PyTorch does not have"),
    (message({"a": entry(shape=(-1,), data_offsets=(4, 0))}), "not counts"),
    (message({"a": entry(shape=(1.0,))}, bytes(4)), "not counts"),
    (message({"a": entry(shape=(True,))}, bytes(4)), "not counts"),
    (message(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "not counts"),
    (message({"a": entry(shape=(2**64, 0), data_offsets=(0, 0))}), "not counts"),
    (message({"a": entry(shape=(0, 2**63), data_offsets=(0, 0))}), "PyTorch cannot have"),
    (message({"a": entry(shape=(0, 2**62, 2**62), data_offsets=(0, 0))}), "PyTorch cannot have"),
    (message({"a": entry(shape=(2**33, 2**33, 0), data_offsets=(0, 0))}), "more elements than can be counted"),
    (message({"a": entry(data_offsets=(0, 4, 4))}, bytes(4)), "3 data_offsets"),
    (message({"a": entry(shape=(2,))}, bytes(4)), "does not fit F32"),
    (message({"a": entry(data_offsets=(0, 8))}, bytes(8)), "does not fit F32"),
    (message({"a": entry()}, bytes(3)), "4 bytes long, but 3"),
    (message({"a": entry()}, bytes(5)), "4 bytes long, but 5"),
    (message({"a": entry(data_offsets=(4, 8))}, bytes(8)), "does not start where"),
    (message({"a": entry(), "b": entry()}, bytes(8)), "does not start where"),
    (message({}, bytes(1)), "0 bytes long, but 1"),
    (message({"__metadata__": {"a": 1}}), "something else than texts"),
    (message({"__metadata__": []}), "no JSON object"),
    (message(b'{"__metadata__":{},"__metadata__":{}}'), "__metadata__ twice"),
    (message(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "each once"),
    (message({"a": entry(more=1e308)}, bytes(4)).replace(b"1e+308", b"1e+309"), "out of range"),
    (message({"a": entry(more=float("nan"))}, bytes(4)), "not JSON"),
    (message(json.dumps({"a": entry(more="\ud800")}).encode(), bytes(4)), "surrogates not allowed"),
    (message(b"\xef\xbb\xbf{}"), "cannot be read"),
    (message("{}".encode("utf-16")), "cannot be read"),
    (message(b'{"\xed\xa0\x80":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "cannot be read"),
    (message({"a": entry(more=json.loads("[" * 126 + "]" * 126))}, bytes(4)), "nested more than 127"),
]
ACCEPTED = [
    message({}),
    message(b" \n{}\t\r "),
    message({"__metadata__": None}),
    message(b'{"__metadata__":{"a":"b","a":"c"}}'),
    message({"": entry()}, bytes(4)),
    message({"a": entry(more=1)}, bytes(4)),
    message({"a": entry(more=json.loads("[" * 125 + "]" * 125))}, bytes(4)),
    message({"a": ["F32", [1], [0, 4]]}, bytes(4)),
    message({"a": entry(dtype={"F32": None})}, bytes(4)),
    message(
        b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    message({"a": entry(shape=(0, 2**62), data_offsets=(0, 0))}),
    message({"a": entry("U8", (3,), (0, 3)), "b": entry("F32", (1,), (3, 7))}, bytes(range(7))),
    message(b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}', bytes(range(8))),
    message({"a": entry(shape=(1,) * 100)}, bytes(4)),
]


@pytest.mark.parametrize(("data", "reason"), REJECTED)
def test_what_does_not_hold_together_is_rejected(data, reason):
    assert read_by_library(data) is None
    with pytest.raises(MessageError, match=f"is not safetensors: .*{reason}"):
        decode_tensors(data)


@pytest.mark.parametrize("data", ACCEPTED)
def test_what_the_library_accepts_is_accepted(data):
    assert same(decode_tensors(data), load(data))


def test_a_header_longer_than_the_library_reads_is_rejected():
    header = b"{}" + b" " * 100_000_000
    assert read_by_library(message(header)) is None
    with pytest.raises(MessageError, match="longer than 100000000 bytes"):
        decode_tensors(message(header))


def test_long_headers_are_not_kept():
    """Each of them would cost as much memory as its sender likes."""
    before = encoding._cached_places.cache_info().currsize
    decode_tensors(message(b"{}" + b" " * MAX_CACHED_HEADER_BYTES))
    assert encoding._cached_places.cache_info().currsize == before
    encoding._cached_places.cache_clear()
    decode_tensors(message(b"{}" + b" " * 9))
    assert encoding._cached_places.cache_info().currsize == 1


# The same verdict as the library, on whatever bytes


def read_by_library(data):
    """None: not accepted. It raises KeyError for types, TypeError and RuntimeError for shapes that PyTorch lacks."""
    try:
        return load(bytes(data))
    except Exception:
        return None


def read_by_us(data):
    try:
        return decode_tensors(data)
    except MessageError:
        return None


def same_verdict(data):
    ours, theirs = read_by_us(data), read_by_library(data)
    return same(ours, theirs) if ours is not None and theirs is not None else ours is theirs


COUNTS = st.sampled_from([0, 1, 2, 3, 4, 8, 2**31, 2**33, 2**62, 2**63, 2**64 - 1, 2**64, -1, 1.0, True, None, "1"])
NUMBERS = [
    "-0",
    "01",
    "1e2",
    "1e400",
    "-1e400",
    "0e9999",
    "9" * 300,
    "9" * 400,
    "NaN",
    "Infinity",
    "18446744073709551615",
]
ATOMS = [
    *NUMBERS,
    '""',
    '"\\ud83d\\ude00"',
    '"\\ud83d"',
    '"\\u00e9"',
    '"\x01"',
    '"\x7f"',
    "null",
    "[]",
    "{}",
    '{"a":1,"a":2}',
]


@st.composite
def header_texts(draw):
    """Headers that are nearly right: each part now and then replaced by what a reader might stumble on."""

    def seldom(usual, *others):
        return draw(st.sampled_from([usual] * (3 * len(others)) + list(others)))

    at, parts = 0, []
    for name in draw(st.lists(st.sampled_from(["a", "b", "", "__metadata__", "\u00e9", "a"]), max_size=4)):
        dtype, shape = draw(st.sampled_from([*DTYPES, "F4", "f32"])), draw(st.lists(COUNTS, max_size=3))
        if seldom(True, False):
            shape = [count if type(count) is int and 0 <= count < 9 else 2 for count in shape]
        size = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        for count in shape:
            size *= count if type(count) is int else 1
        offsets = seldom([at, at + size], [at + 1, at + 1 + size], [at, at], [at, at + size, 0], [0, size])
        at += max(size, 0) if size < 1000 else 0
        fields = [
            f'"dtype":{seldom(json.dumps(dtype), json.dumps({dtype: None}), "1")}',
            f'"shape":{seldom(json.dumps(shape), "[-0]", "null", "{}")}',
            f'"data_offsets":{seldom(json.dumps(offsets), "[-0,4]", "{}")}',
        ]
        if not seldom(True, False):
            fields.append(draw(st.sampled_from([fields[0], f'"more":{draw(st.sampled_from(ATOMS))}'])))
        listed = "[" + ",".join(field.partition(":")[2] for field in fields) + "]"
        value = seldom("{" + ",".join(draw(st.permutations(fields))) + "}", listed, draw(st.sampled_from(ATOMS)))
        if name == "__metadata__":
            value = seldom('{"a":"b"}', value, '{"a":1}', "null")
        parts.append(json.dumps(name, ensure_ascii=draw(st.booleans())) + ":" + value)
    space = draw(st.sampled_from(["", " ", "\n", "\t\r", "\x0c", "\ufeff", "x"]))
    return seldom("", space) + "{" + seldom(",", ", ", ",,").join(parts) + seldom("}", "", "}}") + seldom("", space), at


@settings(deadline=None)
@given(header_texts(), st.sampled_from([0, 0, 0, 0, 1, -1]))
def test_headers_get_the_verdict_of_the_library(header, more):
    text, size = header
    assert same_verdict(message(text.encode(), bytes(range(256)) * 4)[: 8 + len(text.encode()) + max(size + more, 0)])


@settings(deadline=None)
@given(named_tensors(), st.data())
def test_mutated_messages_get_the_verdict_of_the_library(named, data):
    good = save(named)
    length = int.from_bytes(good[:8], "little")
    text, body = bytearray(good[8 : 8 + length]), good[8 + length :]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.sampled_from([b"", b"0", b"-", b",", b'"', b"{", b"}", b"[", b"\xff", bytes(text[:start])])
        )
        text[start : start + data.draw(st.integers(0, 2))] = piece
    assert same_verdict(message(bytes(text), body))
    assert same_verdict(good[: data.draw(st.integers(0, len(good)))])


@settings(deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_get_the_verdict_of_the_library(data, framed):
    assert same_verdict(message(data) if framed else data)
