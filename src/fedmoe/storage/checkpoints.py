"""Checkpoints of the server: named tensors and a JSON note in one safetensors file, with a digest of the whole.

The newest valid one is resumed from. Two are kept, so that a damaged file costs rounds and not the run.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedmoe import trees
from fedmoe.core_types import Tree
from fedmoe.encoding import decode_tensors
from fedmoe.storage.files import write_atomically

T = TypeVar("T")

KEPT = 2
DIGEST_SIZE = 16


class Checkpoint(NamedTuple):
    round: int
    server: Any
    note: dict[str, Any]


def save_checkpoint(folder: Path, round_number: int, server: Tree, note: dict[str, Any]) -> None:
    body = trees.to_bytes(server, {"note": json.dumps(note), "round": str(round_number)})
    digest = hashlib.blake2b(body, digest_size=DIGEST_SIZE).digest()
    write_atomically(_path(folder, round_number), digest + body)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()


def oldest_round(folder: Path) -> int:
    """The earliest round that a resume may still start from: a damaged newest file falls back on the one before."""
    return int(_newest_first(folder)[-1].stem.removeprefix("round-"))


def load_newest(folder: Path, server_type: type[T]) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and a sentence for each newer file that had to be passed over."""
    passed_over = []
    for path in _newest_first(folder):
        content = path.read_bytes()
        digest, body = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
        if hashlib.blake2b(body, digest_size=DIGEST_SIZE).digest() != digest:
            passed_over.append(f"{path.name} is damaged or cut short ({len(content)} bytes): using the one before it.")
            continue
        return _read(body, server_type), passed_over
    return None, passed_over


def _read(body: bytes, server_type: type[T]) -> Checkpoint:
    length = int.from_bytes(body[:8], "little")
    meta = json.loads(body[8 : 8 + length])["__metadata__"]
    server = trees.from_named(server_type, decode_tensors(body))
    return Checkpoint(int(meta["round"]), server, json.loads(meta["note"]))


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:08d}.ckpt"


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.ckpt"), reverse=True)
