"""DP-SGD against Opacus: steps per second on the same model, batches and noise, one thread each, in turns.

    python benchmarks/against_opacus.py [--repeats 5] [--steps 20]

Prints a line per workload: our rate on each backend, Opacus's, their ratio, and the peak memory of each in a process of
its own.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.models.images import SmallCNN
from fedmoe.models.network import Network
from fedmoe.noise import NoiseKey
from fedmoe.private_steps import Mechanism, PrivateSteps
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Sgd

RECORDS, RATE, BATCH, CLASSES = 1000, 0.064, 64, 10
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "logistic regression": ((1, 28, 28), lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))),
    "small CNN": ((1, 28, 28), lambda: SmallCNN((1, 28, 28), CLASSES)),
}
SYSTEMS = ("native", "batched", "opacus")


def drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, *shape, generator=generator), torch.randint(CLASSES, (RECORDS,), generator=generator)


def ours(kind: str, backend: str) -> Callable[[int], None]:
    shape, factory = MODELS[kind]
    network = Network(factory, "expert", shape)
    if backend == "native":
        network.go_native()
    data = side_by_side([examples(*drawn(shape))])
    group = Group(trees.stack([network.init(0)]), ClassifierLoss(network), data, Sgd(0.1))

    def take(steps: int) -> None:
        private = PrivateSteps(Mechanism(1.0, RATE, float(BATCH)), {0: NoiseKey.of_seed(0, 0)}, {0: 0})
        rng = Streams(0, "train", 1, (0,), private_steps=private)
        fit({"model": group}, Schedule(BATCH, steps=steps), rng, backend)  # type: ignore[arg-type]

    return take


def opacus(kind: str) -> Callable[[int], None]:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    shape, factory = MODELS[kind]
    x, y = drawn(shape)
    module = GradSampleModule(factory())
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH)

    def take(steps: int) -> None:
        for _ in range(steps):
            rows = (torch.rand(RECORDS) < RATE).nonzero()[:, 0]
            optimizer.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()

    return take


def system(name: str, kind: str) -> Callable[[int], None]:
    return opacus(kind) if name == "opacus" else ours(kind, name)


def measure(kind: str, repeats: int, steps: int) -> dict[str, float]:
    """The best rate of each system, in turns, so that a busy machine is busy for all of them."""
    takes = {name: system(name, kind) for name in SYSTEMS}
    for take in takes.values():
        take(2)
    rates = dict.fromkeys(SYSTEMS, 0.0)
    for _ in range(repeats):
        for name, take in takes.items():
            begun = time.process_time()
            take(steps)
            rates[name] = max(rates[name], steps / (time.process_time() - begun))
    return rates


def peak_megabytes(name: str, kind: str) -> float:
    code = f"import against_opacus as a; a.prepare(); a.system({name!r}, {kind!r})(5); print(a.peak())"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def peak() -> float:
    """In megabytes, of this process since it was started."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    prepare()
    for kind in MODELS:
        rates = measure(kind, arguments.repeats, arguments.steps)
        memory = {name: round(peak_megabytes(name, kind)) for name in SYSTEMS}
        shown = {name: round(rate, 1) for name, rate in rates.items()}
        best = max(rates["native"], rates["batched"])
        ratio = round(best / rates["opacus"], 2)
        print(json.dumps({"model": kind, "steps per CPU second": shown, "ratio": ratio, "peak MB": memory}))


if __name__ == "__main__":
    main()
