"""Checkpoints of the server: named tensors and a JSON note in one safetensors file that any reader of the format opens.

Its metadata name the run and the round, and begin with a digest of every other byte of the file. The newest usable one
is resumed from. Two are kept, so that a damaged file costs rounds and not the run; what cannot be used is set aside
under another name, so that it neither counts as the newest nor is deleted.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe import trees
from fedmoe.core_types import Tree
from fedmoe.encoding import Bytes, decode_tensors, encode_tensors
from fedmoe.errors import MessageError, RunError
from fedmoe.storage.files import read_bytes, unwritable, write_atomically

KEPT = 2
NAME = re.compile(r"round-(\d{8,})\.safetensors")
BEFORE_DIGEST = b'{"__metadata__":{"digest":"'
DIGEST_SIZE = 32  # bytes; written in hexadecimal
DIGEST = slice(8 + len(BEFORE_DIGEST), 8 + len(BEFORE_DIGEST) + 2 * DIGEST_SIZE)


class Checkpoint(NamedTuple):
    """`note` is whatever JSON the run needs beside the server's state to go on."""

    round: int
    server: Any
    note: dict[str, Any]


def anything(_checkpoint: Checkpoint) -> str | None:
    """No further condition on a checkpoint."""
    return None


def save_checkpoint(folder: Path, checkpoint: Checkpoint, run_id: str, rounds: int | None = None) -> None:
    """The newest two are kept, and the newest two up to `rounds`: what follows the last round must not be in the way
    of more rounds."""
    write_atomically(_path(folder, checkpoint.round), _encode(checkpoint, run_id))
    files = [path for path in _newest_first(folder) if not path.is_dir()]
    of_rounds = [path for path in files if rounds is not None and _round_of(path) <= rounds]
    _delete([path for path in files if path not in files[:KEPT] + of_rounds[:KEPT]])


def drop_from(folder: Path, round_number: int) -> int:
    """Delete the checkpoints of this round and later ones; how many there were."""
    found = [path for path in _newest_first(folder) if _round_of(path) >= round_number and not path.is_dir()]
    _delete(found)
    return len(found)


def _delete(files: Sequence[Path]) -> None:
    for old in files:
        try:
            old.unlink()
        except OSError as error:
            raise unwritable(old, error) from error


def oldest_round(folder: Path) -> int:
    """The earliest round that a resume may still start from: a damaged newest file falls back on the one before."""
    return _round_of(_newest_first(folder)[-1])


def load_newest(
    folder: Path,
    server_type: type[Tree],
    run_id: str,
    usable: Callable[[Checkpoint], str | None] = anything,
    *,
    set_aside: bool = True,
    up_to: int | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest usable checkpoint, and a sentence for each newer file that was passed over and set aside.

    `usable` returns the reason why a checkpoint that is whole cannot be used after all, or None. Who only looks at a
    run leaves files where they are: `set_aside=False`. Files of rounds after `up_to` are not looked at. With the type
    `dict` a state is read as names within names, whatever it was.
    """
    _refuse_earlier_format(folder)
    passed_over: list[tuple[Path, str]] = []
    found_one: tuple[Checkpoint, str] | None = None
    files = (path for path in _newest_first(folder) if up_to is None or _round_of(path) <= up_to)
    for path in files:
        found = _read(path, server_type, run_id)
        reason = found if isinstance(found, str) else usable(found)
        if isinstance(found, Checkpoint) and reason is None:
            found_one = found, path.name
            break
        passed_over.append((path, str(reason)))
    said = [_set_aside(*one) if set_aside else f"{one[0].name} {one[1]}" for one in passed_over]
    if found_one is not None:
        checkpoint, name = found_one
        return checkpoint, [f"{sentence}: using {name} before it." for sentence in said]
    notes = [f"{sentence}." for sentence in said]
    return None, [*notes, "no checkpoint is usable: starting again from round 0."] if notes else []


def _encode(checkpoint: Checkpoint, run_id: str) -> bytearray:
    metadata = {
        "digest": "0" * 2 * DIGEST_SIZE,
        "run_id": run_id,
        "round": str(checkpoint.round),
        "note": json.dumps(checkpoint.note),
    }
    content = bytearray().join(encode_tensors(trees.to_named(checkpoint.server), metadata))
    content[DIGEST] = _digest(content)
    return content


def _digest(content: Bytes) -> bytes:
    """Of all bytes of a file but the digest itself."""
    view = memoryview(content)
    running = hashlib.blake2b(view[: DIGEST.start], digest_size=DIGEST_SIZE)
    running.update(view[DIGEST.stop :])
    return running.hexdigest().encode()


def _read(path: Path, server_type: type[Tree], run_id: str) -> Checkpoint | str:
    """The checkpoint, or why it is none of this run's."""
    if path.is_dir():
        return "is a folder and not a file"
    content = memoryview(bytearray(read_bytes(path)))
    if content[8 : DIGEST.start] != BEFORE_DIGEST or content[DIGEST] != _digest(content):
        return f"is damaged or cut short ({len(content)} bytes)"
    header = bytes(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = json.loads(header)["__metadata__"]
    if metadata["run_id"] != run_id:
        return f"belongs to another run ({metadata['run_id']}, and this is {run_id})"
    if int(metadata["round"]) != _round_of(path):
        return f"holds round {metadata['round']} under another name"
    try:
        named = decode_tensors(content)
        server = trees.nested(named) if server_type is dict else trees.from_named(server_type, named)
    except MessageError as error:
        raise RunError(
            f"{path} does not fit this algorithm: {error} Finish the run with the version of fedmoe that began it, or "
            "choose another run directory (--dir)."
        ) from error
    return Checkpoint(int(metadata["round"]), server, json.loads(metadata["note"]))


def _set_aside(path: Path, reason: str) -> str:
    aside = path.with_name(f"{path.name}.set-aside")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.{number}.set-aside")
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise unwritable(aside, error) from error
    return f"{path.name} {reason} and is set aside as {aside.name}"


def _refuse_earlier_format(folder: Path) -> None:
    if old := sorted(folder.glob("round-*.ckpt")):
        raise RunError(
            f"{old[-1]} was written by an earlier version of fedmoe, whose checkpoints this one does not read. Finish "
            "the run with that version, or choose another run directory (--dir)."
        )


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:08d}.safetensors"


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("round-*") if NAME.fullmatch(path.name)), key=_round_of, reverse=True)


def _round_of(path: Path) -> int:
    return int(path.name.removeprefix("round-").removesuffix(".safetensors"))
