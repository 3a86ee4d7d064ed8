import os
import re
import stat

import pytest

from fedmoe.native import build
from fedmoe.native.build import NoKernels, _load, library, library_note


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own, and nothing remembered."""
    monkeypatch.setenv("FEDMOE_CACHE", str(tmp_path / "cache"))
    _load.cache_clear()
    yield tmp_path
    _load.cache_clear()


@pytest.fixture
def quick(fresh, monkeypatch):
    """A compiler that counts its calls and writes a library at once: compiling the kernels takes seconds."""
    source = fresh / "small.cpp"
    source.write_text('extern "C" int fedmoe_number() { return 42; }\n')
    script = f"""case "$1" in
      --version) echo 1;;
      *) echo called >> {fresh}/calls; for last; do :; done; exec c++ -shared -fPIC {source} -o "$last";;
    esac"""
    monkeypatch.setenv("CXX", compiler(fresh, script))
    return fresh


def compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def compilations(folder):
    return (folder / "calls").read_text().count("called")


def load_again():
    """As a new process would."""
    _load.cache_clear()
    return library()


def cached(folder, suffix):
    (path,) = (folder / "cache").glob(f"*{suffix}")
    return path


def test_a_missing_compiler_is_reported(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler \\(CXX=no-such-compiler\\)"):
        library()
    assert library_note() is None


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(fresh, monkeypatch):
    failing = compiler(fresh, 'case "$1" in --version) echo 1;; *) echo "sources went sour" >&2; exit 1;; esac')
    monkeypatch.setenv("CXX", failing)
    with pytest.raises(NoKernels, match="sources went sour"):
        library()
    assert list((fresh / "cache").iterdir()) == []


def test_a_compiled_file_that_is_no_library_is_reported(fresh, monkeypatch):
    writing = 'case "$1" in --version) echo 1;; *) for last; do :; done; echo junk > "$last";; esac'
    monkeypatch.setenv("CXX", compiler(fresh, writing))
    with pytest.raises(NoKernels, match="cannot be loaded"):
        library()


def test_kernels_are_compiled_once_and_then_taken_from_the_cache(quick):
    library()
    assert load_again().fedmoe_number() == 42
    assert compilations(quick) == 1 and library_note() is None


def test_nobody_else_can_read_or_write_what_is_cached(quick):
    library()
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (quick / "cache").iterdir()}
    assert modes == {".so": 0o600, ".digest": 0o600}
    assert stat.S_IMODE((quick / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["cut short", "changed", "no digest"])
def test_a_damaged_file_is_compiled_anew_and_never_loaded(quick, damage):
    """A library that was cut short ends the process with SIGBUS when it is mapped."""
    library()
    file = cached(quick, ".so")
    content = file.read_bytes()
    if damage == "no digest":
        cached(quick, ".digest").unlink()
    file.unlink()  # not in place: this process has it mapped
    file.write_bytes(content[: len(content) // 3] if damage == "cut short" else content[:-1] + b"?")
    assert load_again().fedmoe_number() == 42
    assert compilations(quick) == 2 and library_note() is None
    assert file.read_bytes() == content


@pytest.mark.parametrize("planted", ["file others can write", "folder others can write", "link"])
def test_what_somebody_else_could_have_planted_is_not_loaded_and_the_user_is_warned(quick, planted):
    library()
    file, folder = cached(quick, ".so"), quick / "cache"
    if planted == "link":
        file.rename(quick / "elsewhere.so")
        file.symlink_to(quick / "elsewhere.so")
    else:
        (file if planted.startswith("file") else folder).chmod(0o777)
    before = file.stat().st_mtime_ns
    assert load_again().fedmoe_number() == 42
    assert compilations(quick) == 2 and file.stat().st_mtime_ns == before
    problem = "is a symbolic link" if planted == "link" else r"can be written by others \(mode 0777\)"
    assert re.search(f"without the cache: {folder}.*{problem}.*FEDMOE_CACHE", library_note())


def test_a_cache_of_another_user_is_not_used(quick, monkeypatch):
    library()
    monkeypatch.setattr(os, "geteuid", lambda: (quick / "cache").stat().st_uid + 1)
    assert load_again().fedmoe_number() == 42
    assert compilations(quick) == 2 and "belongs to user" in library_note()


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_a_note(quick):
    (quick / "cache").write_text("a file, not a folder")
    assert library().fedmoe_number() == 42
    assert "cannot be used" in library_note()


def test_a_user_without_a_home_folder_gets_a_sentence(quick, monkeypatch):
    monkeypatch.setenv("FEDMOE_CACHE", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", no_home)
    assert library().fedmoe_number() == 42
    assert "this user has no home folder; set FEDMOE_CACHE" in library_note()


@pytest.mark.parametrize(("mode", "used"), [(0o777, False), (0o1777, True), (0o775, True)])
def test_a_cache_below_a_folder_that_anyone_can_write_is_not_used(quick, tmp_path, monkeypatch, mode, used):
    """Another user could put a folder of the same name in its place, after it was checked."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setenv("FEDMOE_CACHE", str(shared / "own"))
    assert library().fedmoe_number() == 42
    assert bool(list((shared / "own").glob("kernels-*.so"))) == used
    assert library_note() is None if used else "which anyone can write" in library_note()
