"""Tar archives from elsewhere, read without trust.

Nothing is written under a name that an archive chose: members are read by name and handed out as bytes. An archive with
a link, a device, a path that leads out of its folder, or more bytes than allowed is refused whole.
"""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from fedmoe.data.formats import REMEDY, open_unpacked, read_up_to
from fedmoe.errors import DataError

LARGEST_ARCHIVE = 1 << 29  # bytes of all members together, once unpacked
MOST_MEMBERS = 100_000
UNSOUND = (tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, OverflowError, OSError)


class Bounded:
    """A file that refuses to give more than `limit` bytes, so a forged header cannot fill the memory."""

    def __init__(self, file: IO[bytes], limit: int, path: Path) -> None:
        self.file, self.left, self.path = file, limit, path

    def read(self, size: int) -> bytes:
        chunk = self.file.read(min(size, self.left + 1))
        self.left -= len(chunk)
        if self.left < 0:
            raise DataError(f"{self.path} unpacks to more bytes than this data set has. {REMEDY}")
        return chunk


def read_members(
    path: Path, wanted: Callable[[str], bool], largest: int, limit: int = LARGEST_ARCHIVE
) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of an archive (.tar, .tar.gz, .tar.xz), in its order."""
    try:
        with open_unpacked(path) as file, _open_tar(Bounded(file, limit, path)) as archive:
            seen = set[str]()
            for member in archive:
                _require_harmless(member, seen, path)
                seen.add(member.name)
                if member.isfile() and wanted(member.name):
                    yield member.name, _content(archive, member, largest, path)
    except UNSOUND as error:
        raise DataError(f"{path} is not a sound tar archive ({error}). {REMEDY}") from error


def _open_tar(file: Bounded) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast(IO[bytes], file), mode="r|")


def _require_harmless(member: tarfile.TarInfo, seen: set[str], path: Path) -> None:
    name = PurePosixPath(member.name)
    problem = ""
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name:
        problem = "a path that leads out of the folder"
    elif member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        problem = "a link or device, not a file"
    elif member.name in seen and not member.isdir():
        problem = "there twice"
    elif len(seen) >= MOST_MEMBERS:
        problem = f"one of more than {MOST_MEMBERS} members"
    if problem:
        raise DataError(f"{path}: member {member.name[:80]!r} is {problem}. It is not the published archive. {REMEDY}")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, largest: int, path: Path) -> bytes:
    file = archive.extractfile(member)
    content = bytes(read_up_to(file, largest + 1)) if file and member.size <= largest else b""
    if len(content) != member.size:
        raise DataError(
            f"{path}: member {member.name[:80]!r} states {member.size} bytes, gives {len(content)}, and may have "
            f"{largest}. {REMEDY}"
        )
    return content
