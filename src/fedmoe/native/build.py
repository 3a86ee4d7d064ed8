"""Compile the kernels at first use and cache them: for this source, this compiler and this kind of processor.

Machine code is loaded from the cache only if nobody but the user could have written it and its digest is the one stored
beside it; else it is compiled into a private folder for this process, and `library_note` says so. A machine without a
C++ compiler runs everything too, at PyTorch's own speed.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCES = (
    "vectors.h",
    "layer.h",
    "dense.h",
    "conv_forward.h",
    "conv_sparse_backward.h",
    "products.h",
    "conv_product.h",
    "winograd.h",
    "conv.h",
    "norm.h",
    "simple_layers.h",
    "row_products.h",
    "smooth.h",
    "lstm_rows.h",
    "lstm_forward.h",
    "lstm.h",
    "tape.h",
    "chain.h",
    "private.h",
    "losses.h",
    "fedmix_objective.h",
    "routed_objective.h",
    "client.h",
    "moved_ranges.h",
    "optimizer.h",
    "training.h",
    "kernels.cpp",
)
# No fast-math: NaN and infinity travel as in PyTorch. The parameter is GCC's, which tunes for some processors by
# multiplying and adding in one instruction here and in two there: an example's sum must round alike in every batch.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "--param=avoid-fma-max-bits=0",
    "-shared", "-fPIC",
)  # fmt: skip
SECONDS_TO_COMPILE = 300


class NoKernels(Exception):  # noqa: N818 (not an error: PyTorch takes over)
    """Why there are no kernels on this machine."""


class _UnsafeCache(Exception):  # noqa: N818 (not an error: a private folder takes over)
    """Why the cache is not used."""


class _Loaded(NamedTuple):
    library: ctypes.CDLL
    note: str | None


def library() -> ctypes.CDLL:
    """The loaded kernels, or NoKernels. Compiling takes some seconds, once per machine."""
    return _load(os.environ.get("CXX", ""), os.environ.get("FEDMOE_CACHE", "")).library


def library_note() -> str | None:
    """What the user should know of how the kernels were loaded: why the cache was not used, or None."""
    try:
        return _load(os.environ.get("CXX", ""), os.environ.get("FEDMOE_CACHE", "")).note
    except NoKernels:
        return None


@functools.lru_cache(maxsize=4)  # an exception is not remembered
def _load(compiler_wanted: str, cache_wanted: str) -> _Loaded:
    compiler = _find_compiler(compiler_wanted)
    try:
        return _Loaded(_from_cache(compiler, cache_wanted), None)
    except _UnsafeCache as unsafe:
        with tempfile.TemporaryDirectory(prefix="fedmoe-kernels-") as folder:  # 0700; a loaded library needs no file
            private = Path(folder) / "kernels.so"
            _compile(compiler, private)
            note = f"the native kernels were compiled for this process alone, without the cache: {unsafe}."
            return _Loaded(_open(private), note)


def _from_cache(compiler: str, cache_wanted: str) -> ctypes.CDLL:
    folder = _cache_folder(cache_wanted)
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_private(folder)
        _require_safe_parents(folder)
        if not _is_intact(path):
            _compile_into_cache(compiler, path)
    except OSError as error:
        raise _UnsafeCache(f"the folder {folder} cannot be used ({error})") from error
    return _open(path)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"the compiled kernels {path} cannot be loaded: {error}") from error


def _find_compiler(wanted: str) -> str:
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise NoKernels(f"no C++ compiler ({f'CXX={wanted}' if wanted else 'c++, g++ or clang++'}) was found")


def _cache_folder(wanted: str) -> Path:
    if wanted or os.environ.get("XDG_CACHE_HOME"):
        return Path(wanted) if wanted else Path(os.environ["XDG_CACHE_HOME"]) / "fedmoe"
    try:
        return Path.home() / ".cache" / "fedmoe"
    except RuntimeError as error:
        raise _UnsafeCache(
            "neither FEDMOE_CACHE nor XDG_CACHE_HOME is set and this user has no home folder; "
            "set FEDMOE_CACHE to a folder of your own"
        ) from error


def _require_private(path: Path) -> None:
    """Whoever can write a file or its folder decides which machine code this process runs."""
    info = path.lstat()
    problem = None
    if stat.S_ISLNK(info.st_mode):
        problem = "is a symbolic link"
    elif info.st_uid != os.geteuid():
        problem = f"belongs to user {info.st_uid}, not to user {os.geteuid()} who runs this"
    elif info.st_mode & 0o022:
        problem = f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    if problem:
        raise _UnsafeCache(
            f"{path} {problem}; make it yours alone (chown, chmod go-w), or set FEDMOE_CACHE to another folder"
        )


def _require_safe_parents(folder: Path) -> None:
    """Whoever can write a parent can put another folder in the place of the one that was checked.

    Not so in /tmp and the like (the sticky bit). A parent that a group can write is accepted: on many systems every
    user has a group of their own, and home folders are made so.
    """
    for parent in folder.resolve().parents:
        info = parent.stat()
        shared = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if shared or info.st_uid not in (0, os.geteuid()):
            raise _UnsafeCache(
                f"{folder} lies in {parent}, which {'anyone can write' if shared else 'belongs to another user'}; "
                "set FEDMOE_CACHE to a folder of your own"
            )


def _is_intact(path: Path) -> bool:
    """Whether the cached file has the digest beside it. A file that was cut short would end the process when read."""
    beside = _digest_path(path)
    if not path.exists() or not beside.exists():
        return False
    _require_private(path)
    _require_private(beside)
    return beside.read_text() == _digest(path)


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".digest")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()


def _fingerprint(compiler: str) -> str:
    """Of everything that the machine code depends on; a home folder may be shared by machines of several kinds."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{compiler} --version failed: {error}") from error
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    parts = (sources, " ".join(FLAGS).encode(), compiler.encode(), version, _processor().encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "".join(fields.get(key, "") for key in ("model name", "flags", "Features"))


def _compile_into_cache(compiler: str, path: Path) -> None:
    """Written aside, synced and renamed: several processes may do it at once, and a crash leaves nothing half made.

    The digest is renamed first. Between the two renames the pair does not match, so that another process compiles too.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, digest = Path(folder) / "kernels.so", Path(folder) / "kernels.digest"
        _compile(compiler, made)
        digest.write_text(_digest(made))
        for file in (made, digest):
            file.chmod(0o600)
            _sync(file)
        digest.replace(_digest_path(path))
        made.replace(path)
    _sync(path.parent)


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *FLAGS, str(Path(__file__).parent / SOURCES[-1]), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{compiler} could not be run: {error}") from error
    if done.returncode:
        first = next(iter(done.stderr.strip().splitlines()), "no message")
        raise NoKernels(f"{compiler} could not compile them: {first}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
