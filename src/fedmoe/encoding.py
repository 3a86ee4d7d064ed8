"""Named tensors as bytes in the format of safetensors, and back without a copy.

The library reads the files of others. Messages are too small and too many for it: it took a tenth of a round of small
models, most of it in building and reading the same header again and again. Here a header is made and checked once.
"""

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.errors import MessageError

Bytes = bytes | bytearray | memoryview
Parts = list[Bytes]  # of one message
Form = tuple[str, torch.dtype, torch.Size]  # name, type and shape of a tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8


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
    """In the order of names. The tensors are views of `data` where it can be written, so it must not change after."""
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > len(view) - 8:
        raise _refusal(len(view), "its header does not fit into it")
    places = _places(bytes(view[8 : 8 + length]), len(view) - 8 - length)
    if view.readonly:
        view = memoryview(bytearray(view))
    return {
        name: torch.frombuffer(view, dtype=dtype, count=count, offset=8 + length + start).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
        for name, dtype, shape, count, start in places
    }


def _raw(leaf: Tensor) -> memoryview:
    whole = leaf.detach().contiguous()
    return (whole.view(torch.int16) if leaf.dtype == torch.bfloat16 else whole).numpy().data  # NumPy has no bfloat16


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


@lru_cache(maxsize=256)
def _places(header: bytes, size: int) -> tuple[Place, ...]:
    """Checked: tensors lie one behind the other and fill `size` bytes, each as long as its shape says."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        places = [_place(name, **entry) for name, entry in entries.items()]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _refusal(size + len(header), f"its header cannot be read ({error})") from error
    at = 0
    for place in sorted(places, key=lambda place: (place.start, place.numel)):
        if place.start != at:
            raise _refusal(size + len(header), f"{place.name!r} does not start where the tensor before it ends")
        at += place.numel * place.dtype.itemsize
    if at != size:
        raise _refusal(size + len(header), f"its tensors are {at} bytes long, but {size} follow the header")
    return tuple(sorted(places))


def _place(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> Place:
    start, end = data_offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{name!r} has a shape or a place that is no number of things")
    count = math.prod(shape)
    if end - start != count * DTYPES[dtype].itemsize or start % DTYPES[dtype].itemsize:
        raise ValueError(f"{name!r} lies at {data_offsets}, which does not fit {dtype} {shape}")
    return Place(name, DTYPES[dtype], tuple(shape), count, start)


def _refusal(size: int, reason: str) -> MessageError:
    return MessageError(f"a message of {size} bytes is not safetensors: {reason}.")
