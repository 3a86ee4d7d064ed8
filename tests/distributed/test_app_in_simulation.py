"""The app of `fedmoe flower new`, as it is, in Flower's simulation."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedmoe.silos.app_files import write_app

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
pytestmark = pytest.mark.slow

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def stop_local_link(home: Path) -> None:
    """`flwr run` leaves a SuperLink behind; ours is known by its folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it is gone
            continue
        if b"flower-superlink" in command and str(home).encode() in command:
            os.kill(int(path.parent.name), signal.SIGTERM)


def test_it_runs_as_it_is(tmp_path: Path) -> None:
    write_app(tmp_path / "silo_app")
    home = tmp_path / "flwr"
    home.mkdir()
    environment = {
        **os.environ, **QUIET, "FLWR_HOME": str(home), "FEDMOE_SILO_HOME": str(tmp_path / "silos"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    try:
        done = subprocess.run(
            ["flwr", "run", str(tmp_path / "silo_app"), "local", "--federation-config", "num-supernodes=3", "--stream"],
            env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        stop_local_link(home)
    results = tmp_path / "silos" / "servers" / "silo_app" / "results.json"
    assert results.exists(), done.stdout[-3000:] + done.stderr[-2000:]
    scores = json.loads(results.read_text())["scores"]
    assert {score["client"] for score in scores} == {0, 1, 2}
    nodes = sorted((tmp_path / "silos" / "nodes").glob("client-*/runs/*/private.sqlite"))
    assert len(nodes) == 3 and all(path.stat().st_mode & 0o777 == 0o600 for path in nodes)
