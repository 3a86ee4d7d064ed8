"""With the network cut off except loopback, everything still runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TESTS = [
    "test_ray_pool.py::test_equal_to_the_embedded_engine_to_the_last_bit[fedavg]",
    "test_flower_simulation.py::test_equal_to_the_embedded_engine[fedavg]",
    "test_deployment.py::test_a_run_of_three_nodes_completes",
]


def can_cut_the_network() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-rn", "true"]).returncode == 0


@pytest.mark.skipif(not can_cut_the_network(), reason="this system lets nobody make a network of his own (unshare -rn)")
@pytest.mark.parametrize("test", TESTS)
def test_it_runs_without_a_network(test: str, tmp_path: Path) -> None:
    alone = ["unshare", "-rn", sys.executable, str(HERE / "without_network.py")]
    done = subprocess.run(
        [*alone, f"{HERE}/{test}", f"--basetemp={tmp_path}/t"],
        capture_output=True, text=True, timeout=500, cwd=HERE.parents[1], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
