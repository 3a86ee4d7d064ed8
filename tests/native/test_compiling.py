import stat

import pytest

from fedmoe.native.build import NoKernels, _load, library


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own, and nothing remembered."""
    monkeypatch.setenv("FEDMOE_CACHE", str(tmp_path / "cache"))
    _load.cache_clear()
    yield tmp_path
    _load.cache_clear()


def compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_missing_compiler_is_told(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler \\(CXX=no-such-compiler\\)"):
        library()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(fresh, monkeypatch):
    failing = compiler(fresh, 'case "$1" in --version) echo 1;; *) echo "sources went sour" >&2; exit 1;; esac')
    monkeypatch.setenv("CXX", failing)
    with pytest.raises(NoKernels, match="sources went sour"):
        library()
    assert list((fresh / "cache").iterdir()) == []


def test_a_compiled_file_that_is_no_library_is_told(fresh, monkeypatch):
    writing = 'case "$1" in --version) echo 1;; *) for last; do :; done; echo junk > "$last";; esac'
    monkeypatch.setenv("CXX", compiler(fresh, writing))
    with pytest.raises(NoKernels, match="cannot be loaded"):
        library()


def test_a_cache_that_cannot_be_written_is_told(fresh, monkeypatch):
    (fresh / "cache").write_text("a file, not a folder")
    with pytest.raises(NoKernels, match="could not be compiled into"):
        library()


def test_kernels_are_compiled_once_and_then_taken_from_the_cache(fresh, monkeypatch):
    counting = f'echo called >> {fresh}/calls; exec c++ "$@"'
    monkeypatch.setenv("CXX", compiler(fresh, counting))
    library()
    first = (fresh / "calls").read_text().count("called")
    _load.cache_clear()
    library()
    assert first == 2 and (fresh / "calls").read_text().count("called") == 3  # --version is asked each time
    (kept,) = (fresh / "cache").iterdir()
    assert kept.name.startswith("kernels-") and kept.suffix == ".so"
