"""What a run costs besides training: start-up and a checkpoint. One line, also into results/speed.json.

python benchmarks/overheads.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import record

from fedmoe.algorithms.fedavg import init_server
from fedmoe.models.images import SmallCNN
from fedmoe.models.network import Network
from fedmoe.result import versions
from fedmoe.storage.checkpoints import Checkpoint, save_checkpoint


def seconds_to_start(code: str) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def milliseconds_per_checkpoint() -> float:
    server = init_server(Network(lambda: SmallCNN((3, 32, 32), 10)), 0)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(20):
            start = time.perf_counter()
            save_checkpoint(Path(folder), Checkpoint(number, server, {}), "run")
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    line = {
        "start_python_s": seconds_to_start("pass"),
        "import_torch_s": seconds_to_start("import torch"),
        "import_fedmoe_s": seconds_to_start("import fedmoe.cli"),
        "checkpoint_of_small_cnn_ms": milliseconds_per_checkpoint(),
    }
    record(
        "overheads", "start-up and checkpoint", {**{key: round(value, 2) for key, value in line.items()}, **versions()}
    )


if __name__ == "__main__":
    main()
