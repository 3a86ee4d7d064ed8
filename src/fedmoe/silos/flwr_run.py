"""`fedmoe flower resume` and `personalize`: another run of the app, and how it ended.

`flwr run --stream` shows what a run says and ends with 0 whatever becomes of it, so Flower is asked afterwards.
"""

import json
import re
import subprocess
import time
from pathlib import Path

from fedmoe.engines.flower.environment import program, quiet_environment
from fedmoe.errors import RunError

STARTED = re.compile(r"Successfully started run (\d+)")
ASKING_SECONDS = 60.0  # for one question to Flower
TIMES_ASKED, PAUSE = 10, 1.0  # how a run ended may be on record a little later than its last word


def run_app(app: Path, superlink: str, directory: str, setting: str) -> None:
    """Show what the run says until it ends. Raises RunError where it does not end well."""
    told = f'{setting} directory="{directory}"' if directory else setting
    at = [superlink] if superlink else []
    flwr, environment = program("flwr"), quiet_environment()
    command = [flwr, "run", str(app), *at, "--run-config", told, "--stream"]
    run_id = None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            run_id = found[1] if (found := STARTED.search(line)) else run_id
    if process.returncode or run_id is None:
        raise RunError(f"`flwr run` ended with {process.returncode}; what it said is above.")
    status = _status([flwr, "list", *at, "--run-id", run_id, "--format", "json"])
    if status != "finished:completed":
        raise RunError(f"run {run_id} of Flower is {status}; what it said is above.")


def _status(question: list[str]) -> str:
    for _ in range(TIMES_ASKED):
        answer = subprocess.run(
            question, env=quiet_environment(), capture_output=True, text=True, timeout=ASKING_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            status = str(json.loads(answer.stdout)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError, TypeError):
            return f"in a state that `flwr list` does not tell ({(answer.stderr or answer.stdout).strip()[-200:]})"
        if status.startswith("finished"):
            break
        time.sleep(PAUSE)
    return status
