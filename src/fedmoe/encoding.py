"""Named tensors as bytes in the format of safetensors, and back without a copy.

The library reads the files of others. Messages are too small and too many for it: it took a tenth of a round of small
models, most of it in building and reading the same header again and again. Here a header is made and checked once.
What may come from outside is read as strictly as the library reads it: `decode_tensors` accepts the same bytes, and
raises MessageError for all others (tests/test_encoding.py compares the two).
"""

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.errors import MessageError
from fedmoe.framing import ALIGNMENT
from fedmoe.framing import Bytes as Bytes
from fedmoe.framing import Parts as Parts

Form = tuple[str, torch.dtype, torch.Size]  # name, type and shape of a tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
AS_INTEGERS = {  # for NumPy, which does not have these types
    torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8,
    torch.float8_e4m3fnuz: torch.int8, torch.float8_e5m2fnuz: torch.int8,
}  # fmt: skip
FIELDS = ("dtype", "shape", "data_offsets")  # of a tensor in a header

# The limits of the library.
MAX_HEADER_BYTES = 100_000_000
MAX_DEPTH = 127  # of JSON values in one another
# Longer headers are read anew each time, so that hostile ones cannot fill the memory through the cache.
MAX_CACHED_HEADER_BYTES = 1 << 17


class Place(NamedTuple):
    """Where a tensor lies, counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    start: int


def encode_tensors(named: Tensors, metadata: dict[str, str] | None = None) -> Parts:
    """In parts that follow one another, so that whoever sends them copies them once.

    Widest types first, then by name, as the library does: so every tensor is aligned.
    """
    leaves = sorted(named.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = _header(tuple((name, leaf.dtype, leaf.shape) for name, leaf in leaves), json.dumps(metadata))
    return [header, *(_raw(leaf) for _, leaf in leaves)]


def decode_tensors(data: Bytes) -> Tensors:
    """In the order of names. The tensors are views of `data` where it can be written, so it must not change after.

    Raises MessageError for whatever the library does not accept.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > len(view) - 8:
        raise _not_safetensors(len(view), "its header does not fit into it")
    if length > MAX_HEADER_BYTES:
        raise _not_safetensors(len(view), f"its header is longer than {MAX_HEADER_BYTES} bytes")
    read = _cached_places if length <= MAX_CACHED_HEADER_BYTES else _places
    places = read(bytes(view[8 : 8 + length]), len(view) - 8 - length)
    if view.readonly:
        view = memoryview(bytearray(view))
    return {place.name: _tensor(view, 8 + length, place) for place in places}


def _tensor(view: memoryview, origin: int, place: Place) -> Tensor:
    _, dtype, shape, count, start = place
    if not count:
        return torch.empty(shape, dtype=dtype)
    start += origin
    if start % dtype.itemsize:  # only in messages that others encoded: ours are aligned
        view, start = memoryview(bytearray(view[start : start + count * dtype.itemsize])), 0
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start).view(shape)


def _raw(leaf: Tensor) -> memoryview:
    whole = leaf.detach().contiguous()
    return (whole.view(AS_INTEGERS[leaf.dtype]) if leaf.dtype in AS_INTEGERS else whole).numpy().data


@lru_cache(maxsize=256)
def _header(forms: tuple[Form, ...], metadata: str) -> bytes:
    entries: dict[str, Any] = {} if metadata == "null" else {"__metadata__": json.loads(metadata)}
    at = 0
    for name, dtype, shape in forms:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _places(header: bytes, size: int) -> tuple[Place, ...]:
    """Checked: tensors lie one behind the other and fill `size` bytes, each as long as its shape says."""
    try:
        places = _read_header(header)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _not_safetensors(size + len(header), f"its header cannot be read ({error})") from error
    at = 0
    for place in sorted(places, key=lambda place: (place.start, place.numel)):
        if place.start != at:
            raise _not_safetensors(size + len(header), f"{place.name!r} does not start where the tensor before it ends")
        at += place.numel * place.dtype.itemsize
    if at != size:
        raise _not_safetensors(size + len(header), f"its tensors are {at} bytes long, but {size} follow the header")
    return tuple(sorted(places, key=lambda place: place.name))


_cached_places = lru_cache(maxsize=64)(_places)


class _Object(list[tuple[str, Any]]):
    """A JSON object as the pairs that were written: the library does not accept every key twice."""


def _read_header(header: bytes) -> list[Place]:
    pairs = json.loads(
        header.decode(),  # not json.loads(bytes), which takes other encodings too
        object_pairs_hook=_Object,
        parse_int=_integer,
        parse_float=_finite,
        parse_constant=_no_constant,
    )
    if not isinstance(pairs, _Object):
        raise ValueError("it is no JSON object")
    _check_json(pairs, 1)
    _check_metadata([value for name, value in pairs if name == "__metadata__"])
    entries = {name: _fields(name, value) for name, value in pairs if name != "__metadata__"}
    return [_place(name, *entry) for name, entry in entries.items()]


def _check_json(value: Any, depth: int) -> None:
    """What Python's reader lets pass and the library does not: deep nesting, halves of surrogate pairs."""
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
    if isinstance(value, list | tuple):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        for child in value:
            _check_json(child, depth + (not isinstance(child, tuple)))


def _integer(digits: str) -> int | float:
    """Counts are 64-bit integers without a sign; any other number is a float, as in the library."""
    if digits[0] == "-" or len(digits) > 20 or (number := int(digits)) >= 1 << 64:
        return _finite(digits)
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("it holds a number out of range")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not JSON")


def _check_metadata(found: list[Any]) -> None:
    if len(found) > 1:
        raise ValueError("it holds __metadata__ twice")
    for metadata in found:
        if metadata is not None and not isinstance(metadata, _Object):
            raise ValueError("its __metadata__ is no JSON object")
        if not all(isinstance(value, str) for _, value in metadata or ()):
            raise ValueError("its __metadata__ holds something else than texts")


def _fields(name: str, entry: Any) -> list[Any]:
    """Type, shape and offsets of a tensor, by name; or as a list in this order, which the library accepts too."""
    if isinstance(entry, _Object):
        known = [pair for pair in entry if pair[0] in FIELDS]
        if sorted(key for key, _ in known) != sorted(FIELDS):
            raise ValueError(f"{name!r} does not have {', '.join(FIELDS)}, each once")
        by_name = dict(known)
        entry = [by_name[field] for field in FIELDS]
    if not isinstance(entry, list) or len(entry) != len(FIELDS):
        raise ValueError(f"{name!r} is described by something else than {', '.join(FIELDS)}")
    dtype, shape, offsets = entry
    if isinstance(dtype, _Object) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null}: another way to write "F32" for the library
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} is of the type {dtype!r}, which PyTorch does not have")
    for numbers in (shape, offsets):
        if type(numbers) is not list or not all(type(number) is int for number in numbers):
            raise ValueError(f"{name!r} has a shape or data_offsets that are not counts")
    if len(offsets) != 2:
        raise ValueError(f"{name!r} has {len(offsets)} data_offsets, not 2")
    return [DTYPES[dtype], tuple(shape), offsets]


def _place(name: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: list[int]) -> Place:
    count = 1
    for length in shape:
        count *= length
        if count >= 1 << 64:
            raise ValueError(f"{name!r} has more elements than can be counted")
    if offsets[1] - offsets[0] != count * dtype.itemsize:
        raise ValueError(f"{name!r} lies at {offsets}, which does not fit {NAMES[dtype]} {list(shape)}")
    if not count:
        _try_empty(name, dtype, shape)
    return Place(name, dtype, shape, count, offsets[0])


def _try_empty(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    try:
        torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} has the shape {list(shape)}, which PyTorch cannot have") from error


def _not_safetensors(size: int, reason: str) -> MessageError:
    return MessageError(f"a message of {size} bytes is not safetensors: {reason}.")
