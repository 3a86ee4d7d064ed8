"""Files that are either the old one or the new one, whatever happens in between."""

import errno
import os
from pathlib import Path

from fedmoe.errors import RunError


def write_atomically(path: Path, content: bytes) -> None:
    """Written aside, fsynced, renamed: a crash or a full disk leaves the old file as it was."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RunError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunError(
        f"{path} could not be written: {'the disk is full' if full else error.strerror or error}. "
        "What was saved before is intact: make room, then run the same command again to resume."
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
