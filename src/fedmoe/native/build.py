"""Compile the kernels at first use and keep them: for this source, this compiler and this kind of processor.

A machine without a C++ compiler runs everything too, at PyTorch's own speed.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = (
    "vectors.h",
    "layer.h",
    "dense.h",
    "conv.h",
    "chain.h",
    "losses.h",
    "fedmix_objective.h",
    "training.h",
    "kernels.cpp",
)
# No fast-math: NaN and infinity travel as in PyTorch.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SECONDS_TO_COMPILE = 300


class NoKernels(Exception):  # noqa: N818 (not an error: PyTorch takes over)
    """Why the kernels cannot be had on this machine."""


def library() -> ctypes.CDLL:
    """The loaded kernels, or NoKernels. Compiling takes some seconds, once per machine."""
    return _load(os.environ.get("CXX", ""), os.environ.get("FEDMOE_CACHE", ""))


@functools.lru_cache(maxsize=4)  # also remembers nothing of a failure: an exception is raised anew
def _load(compiler_wanted: str, cache_wanted: str) -> ctypes.CDLL:
    compiler = _find_compiler(compiler_wanted)
    path = _cache_folder(cache_wanted) / f"kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
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
    return Path(wanted) if wanted else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedmoe"


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
    told = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "".join(told.get(key, "") for key in ("model name", "flags", "Features"))


def _compile(compiler: str, path: Path) -> None:
    """Written aside and renamed, so that several processes may do it at once and a stop leaves nothing half made."""
    source = Path(__file__).parent / SOURCES[-1]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            command = [compiler, *FLAGS, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE, check=False)
            if done.returncode:
                first = next(iter(done.stderr.strip().splitlines()), "no message")
                raise NoKernels(f"{compiler} could not compile them: {first}")
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"they could not be compiled into {path.parent}: {error}") from error
