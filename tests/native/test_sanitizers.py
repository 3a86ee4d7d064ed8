"""The native tests with other kernels: under sanitizers, so that nothing is read or written out of bounds (address,
undefined behaviour), and for machines with narrower vectors."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE_TESTS = (
    "tests/native/test_kernel.py",
    "tests/native/test_lstm.py",
    "tests/native/test_residual_kernels.py",
    "tests/training/test_native_epochs.py",
    "tests/training/test_native_texts.py",
    "tests/training/test_trained_names.py",
    "tests/training/test_against_torch.py",
    "tests/training/test_mixed_weights.py",
    "tests/training/test_weighted_copies.py",
    "tests/training/test_routed_experts.py",
    "tests/training/test_class_weights.py",
    "tests/algorithms/test_fedmix_native.py",
)
# With full optimisation the compiler takes minutes for sanitized kernels.
SANITIZED = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
NARROWER = {"AVX2": "-mno-avx512f", "SSE2": "-mno-avx512f -mno-avx2 -mno-fma -mno-avx"}


@pytest.mark.slow
def test_native_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    runtime = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if not runtime or not Path(runtime).is_absolute():
        pytest.skip("g++ with libasan is not installed")
    # Python itself is not free of leaks at its end
    run_with_flags(SANITIZED, tmp_path, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0:abort_on_error=1")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instructions of x86-64")
@pytest.mark.parametrize("vectors", NARROWER)
def test_native_tests_pass_with_narrower_vectors(vectors: str, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    run_with_flags(NARROWER[vectors], tmp_path)


def run_with_flags(flags: str, folder: Path, **environment: str) -> None:
    """The native tests in a process of its own, with kernels that are compiled with these flags too."""
    wrapper = folder / "wrapped-g++"
    # Without the library that is loaded into Python: in the compiler it would only cost minutes.
    wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {shutil.which("g++")} "$@" {flags}\n')
    wrapper.chmod(0o700)
    changed = {**os.environ, "CXX": str(wrapper), "FEDMOE_CACHE": str(folder / "cache"), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *NATIVE_TESTS]
    done = subprocess.run(command, cwd=ROOT, env=changed, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((folder / "cache").rglob("*.so")), "the kernels in use were others"
