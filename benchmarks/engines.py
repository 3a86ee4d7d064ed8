"""What a client update costs on each engine, in turns: embedded, Ray, Flower's simulation, and Flower as it comes.

    python benchmarks/engines.py [--repeats 3] [--workloads W1,W2] [--without-stock]

Needs the extras `ray` and `flower` in this environment. Flower as it comes is `peers/with_flower.py`: its own FedAvg,
with the plain loop's training. Lines go to standard output and into results/speed.json.
"""

import argparse
import statistics
import sys

from record import record
from turns import HERE, Line, System, SystemFailedError, cores, machine, ours, take_turns
from workloads import TITLES, WORKLOADS, Workload

ROUNDS = {"W1": 10, "W1b": 1, "W2": 20}  # of a turn; elsewhere those of the workload


def systems(workload: Workload) -> list[System]:
    script, rounds = str(HERE / "ours.py"), ROUNDS.get(workload.name, workload.rounds)
    others = [
        System(name, [sys.executable, script, workload.name, "--engine", engine], rounds)
        for name, engine in (("Ray", "ray"), ("Flower engine", "flower"))
    ]
    stock = [sys.executable, str(HERE / "peers" / "with_flower.py"), workload.name, "--processes", str(cores())]
    embedded = ours(workload)
    embedded.rounds = rounds
    return [embedded, *others, System("Flower as it comes", stock, rounds)]


def milliseconds_per_update(workload: Workload, line: Line) -> Line:
    """Median over turns."""
    return {
        name: round(1000 * statistics.median(system["seconds"]) / (system["rounds"] * workload.clients_per_round), 2)
        for name, system in line["systems"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--without-stock", action="store_true", help="leave Flower as it comes away: it takes longest")
    arguments = parser.parse_args()
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]
        try:
            measured = systems(workload)[: -1 if arguments.without_stock else None]
            line = take_turns(measured, arguments.repeats)
            line["ms_per_update"] = milliseconds_per_update(workload, line)
        except SystemFailedError as error:
            line = {"error": str(error)}
        record("engines", name, {"title": TITLES[name], **line, **machine()})


if __name__ == "__main__":
    main()
