"""Files that are either the old one or the new one, whatever happens in between, and that only their owner can read.

A run's folder holds private states and what the server learned about clients: files are 0600 and folders 0700 here,
whatever the umask says, temporary ones included.
"""

import errno
import os
from pathlib import Path

from fedmoe.errors import RunError

FILE_MODE, FOLDER_MODE = 0o600, 0o700

REASONS = {
    errno.ENOSPC: ("the disk is full", "make room"),
    errno.EDQUOT: ("the disk is full (your quota is used up)", "make room"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n) or use fewer engine.workers"),
    errno.ENFILE: ("too many files are open on this machine", "close some programs"),
    errno.EISDIR: ("a folder is in its place", "move that folder away"),
    errno.ENOTDIR: ("a file is where a folder should be", "move that file away"),
    errno.ELOOP: ("it is a symbolic link, which is not followed", "remove the link"),
    errno.EACCES: ("permission is denied", "check who owns it"),
    errno.EROFS: ("the disk is read-only", "choose a folder that can be written"),
}


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Written aside, fsynced, renamed: a crash or a full disk leaves the old file as it was."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(open_private(aside, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        _remove(aside)
        raise unwritable(path, error) from error


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that is made if need be; a symbolic link is refused."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(descriptor, FILE_MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_private_folder(path: Path) -> None:
    """With its parents. One that is there already is left as it is."""
    if not path.is_dir():
        if path.parent != path:
            make_private_folder(path.parent)
        try:
            path.mkdir(FOLDER_MODE)
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
            return  # another process was faster
        path.chmod(FOLDER_MODE)


def read_bytes(path: Path) -> bytes:
    """The content of a file that may be missing (FileNotFoundError); whatever else is wrong is a RunError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        reason, remedy = explained(error)
        raise RunError(f"{path} could not be read: {reason}. To go on, {remedy}, then run again.") from error


def unwritable(path: Path, error: OSError) -> RunError:
    reason, remedy = explained(error)
    return RunError(
        f"{path} could not be written: {reason}. What was saved before is intact: {remedy}, then run the same command "
        "again to resume."
    )


def explained(error: OSError) -> tuple[str, str]:
    """(what is wrong, what to do)."""
    return REASONS.get(error.errno or 0, (error.strerror or str(error), "put that right"))


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(aside: Path) -> None:
    """The error that led here is the one to report."""
    try:
        aside.unlink(missing_ok=True)
    except OSError:
        return
