"""What may cross the wire: messages, as named tensors in safetensors. There is no encoder for private state.

An algorithm declares its broadcasts, updates and reports with `@message`; everything else is refused here.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from fedmoe import trees
from fedmoe.core_types import Tensors, Tree
from fedmoe.encoding import ALIGNMENT, Bytes, Parts, decode_tensors, encode_tensors
from fedmoe.errors import MessageError

T = TypeVar("T")


def message(kind: type[T]) -> type[T]:
    """Declare a NamedTuple as a broadcast, an update or a report: something that may be sent."""
    kind.may_be_sent = True  # type: ignore[attr-defined]
    return kind


def encode(tree: Tree) -> Parts:
    """Named tensors of a declared message, as the parts of a blob."""
    _require_message(tree)
    return encode_tensors(trees.to_named(tree))


def encode_answer(update: Tree, report: Tree) -> Parts:
    """An update and the report with it, as one message."""
    _require_message(update)
    _require_message(report)
    return encode_tensors(trees.to_named({"update": update, "report": report}))


def decode_answer(data: Bytes) -> tuple[Tensors, Tensors]:
    """The named tensors of the update and of the report."""
    parts: dict[str, Tensors] = {"update": {}, "report": {}}
    for name, tensor in decode_tensors(data).items():
        part, _, rest = name.partition("/")
        if part not in parts or not rest:
            raise MessageError(f"an answer holds {name!r}, which belongs neither to the update nor to the report.")
        parts[part][rest] = tensor
    return parts["update"], parts["report"]


def _require_message(tree: Tree) -> None:
    if not getattr(type(tree), "may_be_sent", False):
        raise MessageError(
            f"{type(tree).__name__} is not declared as a message, so it may not leave its owner. "
            "Only broadcasts, updates and reports are sent; declare such a type with @message."
        )


def decode(kind: type[T], data: Bytes) -> T:
    return trees.from_named(kind, decode_tensors(data))


def by_expert(named: Tensors) -> Tensors:
    """Names that tell experts apart: what update checks and manifests count by.

    A message with several experts holds them side by side, ``experts/weight`` (H, ...), and their `expert_ids` (H,).

    >>> message = {"expert_ids": torch.tensor([0, 2]), "experts/bias": torch.zeros(2, 5), "phi": torch.zeros(3)}
    >>> sorted(by_expert(message))
    ['expert_ids', 'experts/0/bias', 'experts/2/bias', 'phi']
    """
    expert_ids = named.get("expert_ids")
    if expert_ids is None:
        return named
    if expert_ids.dtype != torch.int64 or expert_ids.dim() != 1 or len(expert_ids.unique()) != len(expert_ids):
        raise MessageError(
            f"expert_ids is {expert_ids.dtype} {tuple(expert_ids.shape)}, not torch.int64 (H,) with each expert once."
        )
    apart: Tensors = {}
    for name, tensor in named.items():
        if not name.startswith("experts/"):
            apart[name] = tensor
            continue
        if tensor.shape[:1] != expert_ids.shape:
            raise MessageError(
                f"{name} has shape {tuple(tensor.shape)}, not one row for each of {len(expert_ids)} expert_ids."
            )
        for number, expert in zip(expert_ids.tolist(), tensor, strict=True):
            apart[f"experts/{number}/{name.removeprefix('experts/')}"] = expert
    return apart


def pack(header: dict[str, Any], blobs: Sequence[Parts] = ()) -> bytearray:
    """One frame: a JSON header and some blobs, each in parts, all aligned: tensors can be read where they lie.

    >>> header, blobs = unpack(pack({"do": "score"}, [[b"a", b"b"], []]))
    >>> header, [bytes(blob) for blob in blobs]
    ({'do': 'score'}, [b'ab', b''])
    """
    sizes = [sum(memoryview(part).nbytes for part in parts) for parts in blobs]
    head = json.dumps({"sizes": sizes, "header": header}).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    padded = [part for parts, size in zip(blobs, sizes, strict=True) for part in (*parts, bytes(-size % ALIGNMENT))]
    return bytearray().join([struct.pack(">Q", len(head)), head, *padded])


def unpack(frame: Bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """The header, and the blobs as views of the frame."""
    try:
        (length,) = struct.unpack_from(">Q", frame)
        head = json.loads(bytes(frame[8 : 8 + length]))
        header, sizes = head["header"], head["sizes"]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise MessageError(f"a frame of {len(frame)} bytes has no readable header: {error}.") from error
    blobs, start, view = [], 8 + length, memoryview(frame)
    for size in sizes:
        blobs.append(view[start : start + size])
        start += size + -size % ALIGNMENT
    if start != len(frame):
        raise MessageError(f"a frame of {len(frame)} bytes states {start}: it was cut or joined on its way.")
    return header, blobs
