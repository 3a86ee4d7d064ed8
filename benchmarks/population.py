"""Does the cost of a round follow the sampled clients, or the population? 100 sampled of 10³, 10⁴, 10⁵, 10⁶ clients.

    python benchmarks/population.py [--rounds 30] [--largest 6] [--engine ray]

Each population is measured in a process of its own: milliseconds per round (median and least), processor time of this
process per round (median), which other programs disturb little, milliseconds to read and write the private state of the
100 sampled clients when every client has one, and peak memory: of this process, on Ray of all of them. Lines go to
standard output and into results/speed.json.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from memory import Peak
from record import record
from torch import Tensor

from fedmoe.clients.generated import generated_federation
from fedmoe.clients.private_store import PrivateStore
from fedmoe.config import parse_config
from fedmoe.engines.steps import RoundRecord
from fedmoe.experiment import run_events
from fedmoe.result import versions

SAMPLED = 100


class Gate(NamedTuple):
    """A private state of the size of a small gate."""

    weight: Tensor


def measure_rounds(population: int, rounds: int, folder: Path, engine: str) -> dict[str, float]:
    """Milliseconds per round of FedAvg with a checkpoint each round."""
    config = parse_config(
        {
            "algorithm": {"name": "fedavg", "validate_every": 10**6},
            "schedule": {"rounds": rounds, "clients_per_round": SAMPLED},
            "evaluation": {"clients": 20},
            "model": {"name": "mlp", "hidden": [16]},
            "engine": {"name": engine, "workers": 1 if engine == "embedded" else 2},
        }
    )
    federation = generated_federation(num_clients=population)
    events = run_events(config, folder, federation=federation)
    ends = [(event.seconds, time.process_time()) for event in events if isinstance(event, RoundRecord)]
    seconds, processor = map(np.array, zip(*ends[2:-1], strict=True))  # the last round also validates
    return {
        "ms_per_round": round(1000 * float(np.median(seconds)), 1),
        "least_ms_per_round": round(1000 * float(seconds.min()), 1),
        "processor_ms_per_round": round(1000 * float(np.median(np.diff(processor))), 1),
    }


def measure_store(population: int, folder: Path) -> float:
    """Milliseconds to read and write 100 private states beside those of everyone else."""
    store = PrivateStore(folder / "private.sqlite", "run")
    for first in range(0, population, 10_000):
        store.save("client", {client: Gate(torch.zeros(64)) for client in range(first, first + 10_000)}, 0)
    rng, times = np.random.default_rng(0), []
    versions: dict[int, int] = {}
    for version in range(1, 12):
        sampled = rng.choice(population, SAMPLED, replace=False).tolist()
        start = time.perf_counter()
        states = {client: store.load("client", Gate, client, versions.get(client, 0)) for client in sampled}
        store.save("client", states, version)
        times.append(1000 * (time.perf_counter() - start))
        versions |= dict.fromkeys(sampled, version)
    return statistics.median(times)


def measure(population: int, rounds: int, engine: str) -> dict[str, object]:
    torch.set_num_threads(1)
    everyone = Peak(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        with everyone.watched() if engine != "embedded" else nullcontext():
            by_round = measure_rounds(population, rounds, Path(folder) / "run", engine)
        peak = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 if engine == "embedded" else everyone.memory.pss
        )
        store = measure_store(population, Path(folder))
    return {
        "clients": population,
        **by_round,
        "ms_private_state": round(store, 1),
        "peak_memory_mb": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--largest", type=int, default=6, help="exponent of the largest population")
    parser.add_argument("--engine", choices=("embedded", "ray"), default="embedded")
    parser.add_argument("--population", type=int, help="measure this one, in this process")
    arguments = parser.parse_args()
    if arguments.population:
        print(json.dumps(measure(arguments.population, arguments.rounds, arguments.engine)), flush=True)
        return
    for exponent in range(3, arguments.largest + 1):
        command = [sys.executable, __file__, "--population", str(10**exponent), "--rounds", str(arguments.rounds)]
        command += ["--engine", arguments.engine]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        section = "population" if arguments.engine == "embedded" else f"population on {arguments.engine}"
        record(section, f"10^{exponent}", {**json.loads(answer), **versions()})


if __name__ == "__main__":
    main()
