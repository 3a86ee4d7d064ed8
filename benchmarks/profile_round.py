"""Where the time of a round goes, in one process: milliseconds per round in parts that do not overlap.

    python benchmarks/profile_round.py W2 [--rounds 200]

Measured with a clock around a few functions, so a part that is called often looks a little dearer than it is.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ours import Ours
from workloads import WORKLOADS

from fedmoe import wire
from fedmoe.algorithms import fedavg
from fedmoe.clients import federation
from fedmoe.engines import replies
from fedmoe.engines.embedded import start
from fedmoe.engines.worker import Worker
from fedmoe.native.trainer import Trainer
from fedmoe.training.local import LocalTrainer

# (where it lives, its name, what it is called here)
PARTS: list[tuple[Any, str, str]] = [
    (Trainer, "run", "kernels"),
    (LocalTrainer, "train_classifier", "trainer around the kernels"),
    (federation, "side_by_side", "clients' examples side by side"),
    (wire, "encode_reply", "replies to bytes"),
    (wire, "decode_reply", "bytes to replies"),
    (wire, "encode", "broadcast to bytes"),
    (wire, "decode", "bytes to broadcast"),
    (wire, "pack", "frames"),
    (wire, "unpack", "frames"),
    (replies, "update_rejections", "update checks"),
    (replies, "report_rejections", "update checks"),
    (fedavg, "aggregate", "average"),
]


class Clock:
    """Time inside a part, without that of parts that it calls."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self.inner = [0.0]

    def around(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self.inner.append(0.0)
            begun = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                whole = time.perf_counter() - begun
                self.seconds[label] += whole - self.inner.pop()
                self.inner[-1] += whole

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=[name for name, workload in WORKLOADS.items() if workload.averages])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    for owner, name, label in PARTS:
        setattr(owner, name, clock.around(getattr(owner, name), label))
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(WORKLOADS[arguments.workload], "embedded")
        with start(Worker(ours.parts, Path(folder) / "private.sqlite", "profile"), 1) as transport:
            ours.run(transport, 3)
            clock.seconds.clear()
            begun = time.perf_counter()
            ours.run(transport, arguments.rounds)
            whole = time.perf_counter() - begun
    clock.seconds["everything else"] = whole - sum(clock.seconds.values())
    for label, seconds in [*clock.seconds.most_common(), ("the round", whole)]:
        print(f"{label:32} {1000 * seconds / arguments.rounds:7.2f} ms {100 * seconds / whole:5.1f} %")


if __name__ == "__main__":
    main()
