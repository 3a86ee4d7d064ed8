"""Sockets in a folder whose path may be longer than the hundred characters that a socket's address has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_folder(folder: Path) -> Iterator[str]:
    """A short path to this folder, as long as it is open. Linux; elsewhere the folder's own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{descriptor}"
        yield short if Path(short).is_dir() else str(folder)
    finally:
        os.close(descriptor)
