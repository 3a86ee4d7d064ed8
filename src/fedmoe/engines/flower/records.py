"""Frames as Flower's records, and back: tensors travel as named arrays, with a JSON header beside them.

Needs no torch: it runs in the short-lived process that Flower starts for every message. Arrays hold the raw bytes of
tensors and are never unpickled or parsed by NumPy; names, types, shapes and sizes are checked when the frame is read.
"""

import json
from typing import Any

from fedmoe.engines.extras import require
from fedmoe.errors import MessageError
from fedmoe.framing import ALIGNMENT, Bytes, Parts, pack, unpack

HEADER, ENVELOPE = "header", "envelope"
STYPE = "raw"  # how arrays are serialised: the bytes of the tensor, little-endian, rows last
MAX_HEADER_BYTES = 1 << 20  # of one client's message
WIDTHS = {  # bytes of the types that a message may hold, by their names in safetensors
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def to_records(frame: Bytes, envelope: dict[str, Any]) -> Any:
    """A frame as a RecordDict; `envelope` says which run it belongs to, beside what the frame itself says."""
    flwr = require("flwr.app", "flower")
    header, blobs = unpack(frame)
    content = flwr.RecordDict()
    content[HEADER] = flwr.ConfigRecord({ENVELOPE: json.dumps(envelope), HEADER: json.dumps(header)})
    for number, blob in enumerate(blobs):
        content[f"message-{number}"] = flwr.ArrayRecord(_arrays(flwr, blob))
    return content


def to_frame(content: Any, max_bytes: int) -> tuple[Bytes, dict[str, Any]]:
    """The frame in a RecordDict, and its envelope. Raises MessageError for whatever is no frame of ours."""
    _check_sizes(content, max_bytes)
    try:
        texts = content.config_records[HEADER]
        header, envelope = json.loads(texts[HEADER]), json.loads(texts[ENVELOPE])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"a message has no header that can be read ({type(error).__name__}: {error}).") from error
    if not isinstance(header, dict) or not isinstance(envelope, dict):
        raise MessageError("the header of a message is no table.")
    names = sorted(content.array_records, key=lambda name: (len(name), name))
    if names != [f"message-{number}" for number in range(len(names))] or len(content.metric_records):
        raise MessageError(f"a message holds the records {names[:5]}, which are not those of a frame.")
    return pack(header, [_blob(content.array_records[name]) for name in names]), envelope


def _check_sizes(content: Any, max_bytes: int) -> None:
    """Before anything is copied."""
    total = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    if total > max_bytes:
        raise MessageError(f"a message holds {total} bytes, and at most {max_bytes} are read.")
    texts = sum(len(value) for record in content.config_records.values() for value in record.values()
                if isinstance(value, str | bytes))  # fmt: skip
    if texts > MAX_HEADER_BYTES:
        raise MessageError(f"the header of a message has {texts} bytes, and at most {MAX_HEADER_BYTES} are read.")


def _arrays(flwr: Any, blob: memoryview) -> dict[str, Any]:
    """The tensors of a message that we encoded ourselves."""
    length = int.from_bytes(blob[:8], "little")
    entries, data = json.loads(bytes(blob[8 : 8 + length])), blob[8 + length :]
    arrays = {}
    for name, entry in sorted(entries.items()):
        start, end = entry["data_offsets"]
        arrays[name] = flwr.Array(entry["dtype"], tuple(entry["shape"]), STYPE, bytes(data[start:end]))
    return arrays


def _blob(record: Any) -> Parts:
    """A message in the format of safetensors, whose reader checks the rest. Widest types first: tensors are aligned."""
    for name, array in record.items():
        if array.stype != STYPE or array.dtype not in WIDTHS:
            kind = f"{array.stype[:40]!r} of {array.dtype[:40]!r}"
            raise MessageError(f"the array {name[:80]!r} is serialised as {kind}, not as {STYPE!r} of a known type.")
    arrays = sorted(record.items(), key=lambda item: (-WIDTHS[item[1].dtype], item[0]))
    entries, at = {}, 0
    for name, array in arrays:
        entries[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [at, at + len(array.data)]}
        at += len(array.data)
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return [len(header).to_bytes(8, "little"), header, *(array.data for _, array in arrays)]
