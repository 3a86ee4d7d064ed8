"""Rounds per second of the embedded engine against plain PyTorch loops, in one run, as ratios.

    python benchmarks/rounds.py [--repeats 5] [--workloads W1,W1b,W2,W4]

Machines are shared and noisy: the three systems take turns, the median of the ratios counts, and a ratio within 1.2
of 1 is no difference.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from plain_loop import PlainClient, Workload, client_data, plain_pool, run_alone
from torch import nn

from fedmoe.algorithms.algorithm import Setting
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.engines.coordinator import Coordinator
from fedmoe.engines.embedded import start
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.worker import Worker
from fedmoe.experiment import versions
from fedmoe.models.images import SmallCNN, mlp
from fedmoe.models.network import Network
from fedmoe.models.resnet import resnet
from fedmoe.training.plan import TrainingPlan
from fedmoe.training.ways import choose_way, cohort_size

WORKLOADS = {
    "W1": Workload("W1", 100, 100, (3, 32, 32), 5, 3, 10, "adam", 5e-5, rounds=12),
    "W1b": Workload("W1b", 100, 100, (3, 32, 32), 50, 3, 10, "adam", 5e-5, rounds=2),
    "W2": Workload("W2", 1000, 60, (784,), 10, 1, 10, "sgd", 0.03, rounds=60),
    "W4": Workload("W4", 10, 100, (3, 32, 32), 10, 1, 20, "sgd", 0.1, rounds=1),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "W1": lambda: SmallCNN((3, 32, 32), 10),
    "W1b": lambda: SmallCNN((3, 32, 32), 10),
    "W2": lambda: mlp((784,), 10, ()),
    "W4": lambda: resnet((3, 32, 32), 10, depth=20, groups=4),
}


def federation_of(workload: Workload) -> Federation:
    def hold(client: int) -> Records:
        rows = examples(*client_data(workload, client))
        everyone = torch.ones(len(rows.y), dtype=torch.bool)
        none = examples(rows.x[:0], rows.y[:0])
        return Records(rows, none, none, everyone, everyone[:0])

    held = [hold(client) for client in range(workload.num_clients)]  # in memory, as for the plain loop
    pool = np.arange(workload.num_clients)
    return Federation(workload.num_clients, 0, 10, workload.input_shape, pool, held[0].test, held.__getitem__)


class Ours:
    """The embedded engine, driven round by round."""

    def __init__(self, workload: Workload, processes: int, folder: Path) -> None:
        network = Network(MODELS[workload.name])
        plan = TrainingPlan(workload.epochs, workload.batch_size, workload.learning_rate, workload.optimizer)
        way = choose_way([network])
        algorithm = fedavg(
            FedAvgConfig(validate_every=10**9),
            Setting(network, network, plan, plan, plan, workload.clients_per_round, way),
        )
        federation = federation_of(workload)
        self.engine = start(Worker(algorithm, federation, folder / "private.sqlite", 0), processes)
        self.coordinator = Coordinator(
            algorithm,
            federation,
            self.engine.__enter__(),
            seed=0,
            rounds=10**9,
            cohort_size=cohort_size([network], way),
            manifest=Manifest(),
        )
        self.server, self.round = algorithm.init_server(0), 0

    def run(self, rounds: int) -> float:
        seconds = 0.0
        for _ in range(rounds):
            self.round += 1
            self.server, record = self.coordinator.run_round(self.server, self.round)
            seconds += record.seconds
        return seconds

    def stop(self) -> None:
        self.engine.__exit__(None, None, None)


def measure(workload: Workload, repeats: int, processes: int) -> dict[str, object]:
    client = PlainClient(workload, MODELS[workload.name]())
    with tempfile.TemporaryDirectory() as folder, plain_pool(workload, client, processes) as pool:
        ours = Ours(workload, processes, Path(folder))
        for warm in (lambda: run_alone(workload, client, 2), lambda: pool.run(2), lambda: ours.run(2)):
            warm()
        turns = [
            (run_alone(workload, client, workload.rounds), pool.run(workload.rounds), ours.run(workload.rounds))
            for _ in range(repeats)
        ]
        ours.stop()
    alone = [turn[0] / turn[2] for turn in turns]
    together = [turn[1] / turn[2] for turn in turns]
    return {
        "workload": workload.name,
        "rounds_per_s": round(workload.rounds / statistics.median(turn[2] for turn in turns), 2),
        "speed_against_one_process": spread(alone),
        f"speed_against_{processes}_processes": spread(together),
    }


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    processes = len(os.sched_getaffinity(0))
    for name in arguments.workloads.split(","):
        line = measure(WORKLOADS[name], arguments.repeats, processes)
        print(json.dumps({**line, "load": round(os.getloadavg()[0], 2), "cores": processes, **versions()}), flush=True)


if __name__ == "__main__":
    main()
