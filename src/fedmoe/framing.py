"""Frames: a JSON header and some blobs as one piece of memory. Needs no torch: a node's short-lived process uses it."""

import json
from collections.abc import Sequence
from typing import Any

from fedmoe.errors import MessageError

Bytes = bytes | bytearray | memoryview
Parts = list[Bytes]  # of one message

ALIGNMENT = 8
MAX_HEADER_BYTES = 64 << 20  # the header lists clients, so this is a few million


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
    return bytearray().join([len(head).to_bytes(8, "big"), head, *padded])


def unpack(frame: Bytes, max_header: int = MAX_HEADER_BYTES) -> tuple[dict[str, Any], list[memoryview]]:
    """The header, and the blobs as views of the frame. Raises MessageError for whatever is not a frame."""
    view = memoryview(frame)
    length = int.from_bytes(view[:8], "big")
    if len(view) < 8 or length > min(len(view) - 8, max_header):
        raise _no_frame(view, f"its header of {length} bytes does not fit into it, or is above {max_header}")
    try:
        head = json.loads(str(view[8 : 8 + length], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise _no_frame(view, f"its header cannot be read ({error})") from error
    if not isinstance(head, dict) or head.keys() != {"sizes", "header"} or not isinstance(head["header"], dict):
        raise _no_frame(view, "its header is not a header and the sizes of what follows")
    sizes = head["sizes"]
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise _no_frame(view, "the sizes in its header are not counts")
    if (stated := 8 + length + sum(size + -size % ALIGNMENT for size in sizes)) != len(view):
        raise _no_frame(view, f"it states {stated} bytes, so it was cut or joined on its way")
    blobs, start = [], 8 + length
    for size in sizes:
        blobs.append(view[start : start + size])
        start += size + -size % ALIGNMENT
    return head["header"], blobs


def _no_frame(view: memoryview, reason: str) -> MessageError:
    return MessageError(f"{len(view)} bytes are not a frame: {reason}.")
