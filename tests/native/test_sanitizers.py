"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: nothing out of bounds in any native test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE_TESTS = (
    "tests/native/test_kernel.py",
    "tests/native/test_residual_kernels.py",
    "tests/training/test_native_epochs.py",
    "tests/training/test_trained_names.py",
    "tests/training/test_against_torch.py",
    "tests/training/test_mixed_weights.py",
    "tests/training/test_weighted_copies.py",
    "tests/training/test_routed_experts.py",
    "tests/training/test_class_weights.py",
    "tests/algorithms/test_fedmix_native.py",
)
WRAPPER = '#!/bin/sh\nexec {compiler} "$@" -g -fsanitize=address,undefined -fno-sanitize-recover=undefined\n'


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
    wrapper = tmp_path / "sanitized-g++"
    wrapper.write_text(WRAPPER.format(compiler=compiler))
    wrapper.chmod(0o700)
    sanitized = {
        **os.environ, "CXX": str(wrapper), "FEDMOE_CACHE": str(tmp_path / "cache"), "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python itself is not free of leaks at its end
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *NATIVE_TESTS]
    done = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((tmp_path / "cache").rglob("*.so")), "the sanitized kernels were not the ones in use"
