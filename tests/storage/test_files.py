import errno
import os
import resource

import pytest

from fedmoe.errors import RunError
from fedmoe.storage.files import make_private_folder, read_bytes, write_atomically


def names(folder):
    return [path.name for path in folder.iterdir()]


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_the_new_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["state"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full.*make room"),
        (errno.EDQUOT, "the disk is full.*make room"),
        (errno.EIO, "Input/output error"),
        (errno.EMFILE, "too many files are open.*ulimit -n"),
    ],
)
def test_a_disk_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, number, reason):
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def fail(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match=reason) as raised:
        write_atomically(path, b"new")
    assert "What was saved before is intact" in str(raised.value)
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


def test_a_folder_in_the_place_of_the_file_is_said(tmp_path):
    (tmp_path / "state" / "within").mkdir(parents=True)
    with pytest.raises(RunError, match="state could not be written: a folder is in its place"):
        write_atomically(tmp_path / "state", b"new")
    with pytest.raises(RunError, match="state could not be read: a folder is in its place"):
        read_bytes(tmp_path / "state")
    assert names(tmp_path) == ["state"]


def test_files_are_for_the_owner_only_from_their_first_byte_on(tmp_path, umask, monkeypatch):
    during = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (during.append(os.fstat(fd).st_mode & 0o777), fsync(fd))[1])
    aside = tmp_path / ".state.part"
    aside.write_bytes(b"left by a process that was killed")
    aside.chmod(0o644)
    write_atomically(tmp_path / "state", b"new")
    assert during[0] == 0o600 and mode(tmp_path / "state") == 0o600


def test_folders_are_for_the_owner_only_parents_that_are_made_included(tmp_path, umask):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    make_private_folder(shared / "runs" / "one")
    make_private_folder(shared / "runs" / "one")
    assert [mode(p) for p in (shared, shared / "runs", shared / "runs" / "one")] == [0o755, 0o700, 0o700]


def test_a_link_that_lies_where_the_temporary_file_goes_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".state.part").symlink_to(victim)
    with pytest.raises(RunError, match="symbolic link"):
        write_atomically(tmp_path / "state", b"new")
    assert victim.read_bytes() == b"precious"
