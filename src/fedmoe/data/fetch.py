"""One file over HTTP: resumed where an earlier attempt stopped, and compared with its published checksum.

Python's own client, since pooch, the usual library for this, starts a broken download anew.
"""

import errno
import hashlib
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedmoe.data.source_spec import Remote
from fedmoe.errors import DataError

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte
PAUSE = 1.0  # seconds before another attempt
MOST_ATTEMPTS = 100  # in all; of these, at most MOST_FRUITLESS in a row that bring nothing
MOST_FRUITLESS = 3
LARGEST_DOWNLOAD = 1 << 29  # bytes
LASTING = range(400, 500)  # statuses that another attempt would not change
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class Progress(NamedTuple):
    """Of one file. `received` includes the bytes of earlier attempts; `expected` is None if the server does not say."""

    file: str
    received: int
    expected: int | None


Show = Callable[[Progress], None]


def fetch(remote: Remote, path: Path, show: Show) -> None:
    """Download to `path`, by way of `path`.part. What has arrived stays there if the connection breaks."""
    if path.exists() and not problem_of(path, remote.checksum):
        return
    part = path.with_name(f"{path.name}.part")
    problem, fruitless = "", 0
    for _ in range(MOST_ATTEMPTS):
        had = _size(part)
        problem = _attempt(remote, part, show)
        if not problem:
            problem = problem_of(part, remote.checksum)
            if not problem:
                part.replace(path)
                return
            part.unlink()
            if not had:
                break  # sent whole, and wrong: it would be so again
        fruitless = 0 if _size(part) > had else fruitless + 1
        if fruitless == MOST_FRUITLESS:
            break
        time.sleep(PAUSE)
    raise DataError(f"{remote.url}: {problem}.")


def problem_of(path: Path, checksum: str) -> str:
    """How a file differs from its checksum, or nothing."""
    algorithm, expected = checksum.split(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    return "" if found == expected else f"what was sent has {algorithm} {found}, not the published {expected}"


def _attempt(remote: Remote, part: Path, show: Show) -> str:
    """Receive what is missing; returns what went wrong, or nothing."""
    try:
        return _receive(remote, part, show)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # nothing after what is here: it is whole, or it is not the beginning of this file
            return "" if _size(part) else "the server refuses to send it"
        if error.code in LASTING:
            raise DataError(f"{remote.url}: the server replies {error.code} {error.reason}.") from error
        return f"the server replies {error.code} {error.reason}"
    except OSError as error:
        if error.errno in DISK:
            raise DataError(f"{part} cannot be written ({error.strerror}). Make room, then run it again.") from error
        return f"the connection failed ({getattr(error, 'reason', None) or error})"
    except HTTPException as error:
        return f"the server's reply makes no sense ({type(error).__name__})"


def _receive(remote: Remote, part: Path, show: Show) -> str:
    have = _size(part)
    headers = {"User-Agent": "fedmoe", "Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with urlopen(Request(remote.url, headers=headers), timeout=TIMEOUT) as response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()
            return "the server sent another part than asked for"
        have = have if response.status == 206 else 0  # a server that cannot resume sends all of it
        length = response.headers.get("Content-Length", "")
        expected = have + int(length) if length.isdecimal() else None
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                show(Progress(remote.file, have, expected))
                if have > LARGEST_DOWNLOAD:
                    raise DataError(f"{remote.url} sends more than {LARGEST_DOWNLOAD} bytes: not the published file.")
    return f"the connection broke after {have} of {expected} bytes" if expected and have < expected else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
