import errno
import os
import resource

import pytest

from fedmoe.errors import RunError
from fedmoe.storage.files import write_atomically


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_the_new_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["state"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "Input/output error")],
)
def test_a_disk_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, number, reason):
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def fail(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match=f"{reason}.*intact"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["state"]


def test_a_limit_that_is_hit_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RunError, match="could not be written"):
            write_atomically(path, b"x" * 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old" and names(tmp_path) == ["state"]


def test_the_content_is_on_disk_before_the_name_points_to_it(tmp_path, monkeypatch):
    """A rename that overtakes the content leaves an empty file after a power cut."""
    path, events = tmp_path / "state", []
    fsync, replace = os.fsync, type(path).replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(type(path), "replace", lambda self, to: (events.append("rename"), replace(self, to))[1])
    write_atomically(path, b"new")
    assert events == ["fsync", "rename", "fsync"]  # the content, the name, the folder


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "state", b"new")
