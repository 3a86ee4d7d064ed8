"""What docs/from_csv_to_service.md shows works as printed, command by command, in one shell."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "from_csv_to_service.md"
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
# The package is installed already, and `python` and `fedmoe` are those of these tests.
SHELL = """set -e -m
pip() { :; }
python() { '%(python)s' "$@"; }
fedmoe() { '%(python)s' -m fedmoe "$@"; }
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def in_one_shell(script: str, folder: Path) -> str:
    """Its output; whatever it started ends with it."""
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        _end_session(process.pid)
    assert process.returncode == 0, output
    return output


def _end_session(leader: int) -> None:
    """With job control every job is a process group of its own, but all are of one session."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            session = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if session == leader:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("curl")), reason="the page's commands need bash and curl"
)
def test_the_whole_way(tmp_path: Path) -> None:
    assert 8 <= len(COMMANDS) < 15
    port = free_port()
    script = SHELL % {"python": sys.executable} + "\n".join(COMMANDS).replace("8000", str(port))
    output = in_one_shell(script, tmp_path)

    answer = json.loads(output[output.index('{"class_names"') :].splitlines()[0])
    printed = json.loads(re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)[0])
    assert answer["classes"] == printed["classes"] and answer["experts"]["answered"] == ["specialist"]
    assert answer["probabilities"][0] == pytest.approx(printed["probabilities"][0], abs=0.02)

    with (tmp_path / "predicted.csv").open(newline="") as file:
        predicted = list(csv.DictReader(file))
    assert len(predicted) == 15 and {row["class"] for row in predicted} == {"ill", "well"}
    assert {path.name for path in (tmp_path / "coast").iterdir()} == {
        "README.md", "model.json", "model.onnx", "model.pt2", "model.safetensors",
    }  # fmt: skip
    results = json.loads((tmp_path / "runs/wards/results.json").read_text())
    own = {s["client"]: s["accuracy"] for s in results["scores"] if (s["model"], s["data"]) == ("after", "own")}
    before = {s["client"]: s["accuracy"] for s in results["scores"] if (s["model"], s["data"]) == ("before", "own")}
    assert own[2] - before[2] > 0.3 and sum(own.values()) / 3 == pytest.approx(0.917, abs=0.03)
    assert "2" not in json.loads((tmp_path / "runs/wards/manifest.json").read_text())["messages_of_client"]
