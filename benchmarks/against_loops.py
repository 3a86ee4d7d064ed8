"""Ours against plain PyTorch loops, in one process and in one process per core, and against the machine itself.

    python benchmarks/against_loops.py [--repeats 5] [--workloads W1,W1b,W2,W3,W4,W4b,W5]

Convolutional networks run beside large matrix products, which say what the cores can do; W3 also beside the way of the
method's authors. Lines go to standard output and into results/speed.json.
"""

import argparse
import sys

from matmul import FLOP
from record import record
from turns import HERE, Line, System, cores, machine, ours, plain, ratios, speed_of_ours, take_turns
from workloads import PRODUCTS as COUNTED
from workloads import TITLES, WORKLOADS, Workload, step_flop

PRODUCTS = 10  # of one turn


def matmul(processes: int) -> System:
    command = [sys.executable, str(HERE / "matmul.py"), "--processes", str(processes)]
    return System(f"matmul in {processes}", command, PRODUCTS)


def measure(workload: Workload, repeats: int) -> Line:
    systems = [ours(workload), plain(workload, 1), plain(workload, cores())]
    if workload.model == "mixture":
        systems.append(plain(workload, 1, authors_way=True))
    if workload.model in COUNTED:
        systems += [matmul(1), matmul(cores())]
    line = take_turns(systems, repeats)
    line["speed_of_ours"] = speed_of_ours(line)
    if workload.model in COUNTED:
        line["machine_rate"] = machine_rate(workload, line)
    return {"title": TITLES[workload.name], **line, **machine()}


def machine_rate(workload: Workload, line: Line) -> Line:
    """GFLOP/s of large products, and ours in dense-equivalent operations as a share of that on all cores."""
    work = workload.rounds * workload.steps_per_round * step_flop(workload)
    own = [work / seconds for seconds in line["systems"]["ours"]["seconds"]]
    rates = {
        processes: [processes * PRODUCTS * FLOP / s for s in line["systems"][f"matmul in {processes}"]["seconds"]]
        for processes in (1, cores())
    }
    return {
        "gflops_one_process": ratios(rates[1], [1e9] * len(own)),
        "gflops_all_cores": ratios(rates[cores()], [1e9] * len(own)),
        "gflops_ours": ratios(own, [1e9] * len(own)),
        "share_of_all_cores": ratios(own, rates[cores()]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    for name in arguments.workloads.split(","):
        record("loops", name, measure(WORKLOADS[name], arguments.repeats))


if __name__ == "__main__":
    main()
