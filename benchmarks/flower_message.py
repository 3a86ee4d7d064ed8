"""Where the time of a message to a node goes: starting a process, imports, asking the worker that stays, training.

    python benchmarks/flower_message.py [--repeats 5] [--run FOLDER]

Flower starts a process for every message. Without a worker that stays alive that process would import torch and read
the client's data each time. `--run` is the folder of a deployment's server: what its rounds took as a whole. One line,
also into results/speed.json. Needs the extra `flower`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import record

from fedmoe import assembly
from fedmoe.config import read_config
from fedmoe.engines.session import Session
from fedmoe.framing import Bytes
from fedmoe.result import versions
from fedmoe.silos.app_files import write_app
from fedmoe.silos.client import ask_worker
from fedmoe.silos.place import Place
from fedmoe.silos.silo_data import server_federation
from fedmoe.silos.supervisor import stop_workers
from fedmoe.silos.warm import open_node

FLOWER = "import flwr.supernode.runtime.run_clientapp"
ENVELOPE = {"run": "0" * 32, "attempt": 1}


class FirstFrames:
    """A transport that keeps what a session sends first."""

    trusted, one_store = False, False

    def __init__(self) -> None:
        self.frames: list[Bytes] = []

    def run(self, frames: list[Bytes]) -> list[tuple[int, Bytes]]:
        self.frames += frames
        return []


def median_seconds(work: Callable[[int], object], repeats: int) -> float:
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 3)


def starting(code: str, repeats: int) -> float:
    return median_seconds(lambda _: subprocess.run([sys.executable, "-c", code], check=True), repeats)


def frame_for_client_0(app: Path) -> Bytes:
    config = read_config(app / "fedmoe.toml")
    transport = FirstFrames()
    Session(assembly.build(config, federation=server_federation(config)), transport).next_round()  # type: ignore[arg-type]
    return transport.frames[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    line = {
        "start_python_s": starting("pass", repeats),
        "import_flower_s": starting(FLOWER, repeats),
        "and_our_client_app_s": starting(f"{FLOWER}; import fedmoe.silos.client", repeats),
        "and_a_cold_worker_s": starting(f"{FLOWER}; import fedmoe.silos.warm", repeats),
    }
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "silo_app"
        write_app(app)
        place = Place(str(app), "silo_app.data:client_data", 0, f"{folder}/node", {"partition-id": 0}, {}, agrees=True)
        frame = frame_for_client_0(app)
        node = open_node(place)
        # Another attempt each time: what was replied already would be given again.
        line["training_s"] = median_seconds(lambda n: node.handle({**ENVELOPE, "attempt": n}, frame), repeats)
        node.close()
        try:
            line["first_message_s"] = median_seconds(lambda _: ask_worker(place, ENVELOPE, frame), 1)
            asked = median_seconds(lambda n: ask_worker(place, {**ENVELOPE, "attempt": 10 + n}, frame), repeats)
            line["message_to_the_worker_s"] = asked
        finally:
            stop_workers(Path(place.home))
    if arguments.run:
        events = map(json.loads, (arguments.run / "metrics.jsonl").read_text().splitlines())
        line["round_of_a_deployment_s"] = round(
            statistics.median(event["seconds"] for event in events if event["event"] == "round"), 2
        )
    record("flower message", "one client of the app template", {**line, **versions()})


if __name__ == "__main__":
    main()
