"""Ours against other frameworks: Flower's simulation, pfl and fedjax from the package index, each in its environment.

    python benchmarks/against_peers.py [--repeats 3] [--peers flower,pfl,fedjax] [--workloads W1,W1b,W2,W3,W4,W4b,W5]

Same tensors, same steps, in turns with ours and the plain loop in one process per core. Environments are made under
.bench/, or taken from the folder that FEDMOE_BENCH_ENVS names. A peer that cannot be installed or fails is recorded
with its error. Lines go to standard output and into results/speed.json.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from record import record
from turns import HERE, SCRATCH, Line, System, SystemFailedError, cores, machine, ours, plain, speed_of_ours, take_turns
from workloads import TITLES, WORKLOADS, Workload

INSTALLED = "installed.txt"  # in an environment that is ready: what it holds


class Variant(NamedTuple):
    title: str
    arguments: tuple[str, ...] = ()


class Peer(NamedTuple):
    script: str
    # Installed one after the other: torch is pinned first, so that no later package chooses one.
    packages: tuple[tuple[str, ...], ...]
    variants: tuple[Variant, ...]
    workloads: tuple[str, ...]


TORCH = ("torch==2.13.0", "numpy")
PER_CORE = ("--processes", str(cores()))
PEERS = {
    "flower": Peer(
        "with_flower.py",
        (TORCH, ("flwr[simulation]>=1.41,<1.42",)),
        (Variant("Flower, one actor per core", PER_CORE),),
        ("W1", "W1b", "W2", "W3", "W4", "W4b", "W5"),
    ),
    "pfl": Peer(
        "with_pfl.py",
        (TORCH, ("pfl==0.6.0",)),
        (Variant("pfl, one process"), Variant("pfl, one process per core", PER_CORE)),
        ("W1", "W1b", "W2", "W4", "W4b", "W5"),
    ),
    "fedjax": Peer(
        "with_fedjax.py",
        (("fedjax==0.0.17", "jax==0.10.2"),),
        (Variant("fedjax"), Variant("fedjax, convolution as product", ("--convolution", "products"))),
        ("W1", "W1b", "W2"),
    ),
}


def environment_of(name: str, peer: Peer) -> Path:
    """The peer's Python; its environment is made where there is none."""
    folder = Path(os.environ.get("FEDMOE_BENCH_ENVS", SCRATCH)).resolve() / name
    python = folder / "bin" / "python"
    if (folder / INSTALLED).exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for packages in peer.packages:
        done = subprocess.run([*pip, "install", *packages], capture_output=True, text=True)
        if done.returncode:
            raise SystemFailedError(f"pip install {' '.join(packages)}: {done.stderr.strip()[-1000:]}")
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True)
    (folder / INSTALLED).write_text(frozen.stdout)
    return python


def variants_for(peer: Peer, workload: Workload) -> Sequence[Variant]:
    """There is no convolution to write differently in a logistic regression."""
    return [v for v in peer.variants if workload.model == "cnn" or "--convolution" not in v.arguments]


def measure(peer: Peer, python: Path, workload: Workload, repeats: int) -> Line:
    script = str(HERE / "peers" / peer.script)
    theirs = [
        System(variant.title, [str(python), script, workload.name, *variant.arguments], workload.rounds)
        for variant in variants_for(peer, workload)
    ]
    line = take_turns([ours(workload), plain(workload, cores()), *theirs], repeats)
    return {"title": TITLES[workload.name], **line, "speed_of_ours": speed_of_ours(line), **machine()}


def measure_all(name: str, peer: Peer, workloads: Sequence[str], repeats: int) -> Iterator[tuple[str, Line]]:
    """A line per workload: what was measured, or why it could not be."""
    try:
        python = environment_of(name, peer)
    except (SystemFailedError, subprocess.CalledProcessError) as error:
        yield from ((workload, {"error": str(error)}) for workload in workloads)
        return
    for workload in workloads:
        try:
            yield workload, measure(peer, python, WORKLOADS[workload], repeats)
        except SystemFailedError as error:
            yield workload, {"error": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    for name in arguments.peers.split(","):
        wanted = [workload for workload in PEERS[name].workloads if workload in arguments.workloads.split(",")]
        for workload, line in measure_all(name, PEERS[name], wanted, arguments.repeats):
            record("peers", f"{name} {workload}", line)


if __name__ == "__main__":
    main()
