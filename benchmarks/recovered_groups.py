"""How well a run recovered the true groups of its clients: the adjusted Rand index after every round.

A client's group is the expert that it uses most: the largest q(z|s) of the assignment in metrics.jsonl, against
`Split.domains`. 1: the same groups; about 0: no better than chance.

    python benchmarks/recovered_groups.py RUN...
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.metrics import adjusted_rand_score

from fedmoe.partition.split import Split
from fedmoe.storage.rundir import RunDirectory


def recovered(folder: Path) -> list[float]:
    """One index per round; 0 where all clients are in one group."""
    run = RunDirectory(folder)
    domains = Split.load(run.split).domains
    if domains is None:
        raise SystemExit(f"{folder}: the split has no groups to recover; use split.kind = 'permutation'.")
    indices = []
    for event in run.read_metrics():
        told = event.get("experts", {}).get("assignment")
        if told and told["of"] == "client":
            found = np.array(told["shares"]).argmax(1)
            indices.append(float(adjusted_rand_score(domains[: len(found)], found)))
    return indices


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(f"{path.name}: " + " ".join(f"{index:.2f}" for index in recovered(path)))
