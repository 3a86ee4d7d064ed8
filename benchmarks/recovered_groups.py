"""How well a run recovered the true groups of its clients: the adjusted Rand index after every round.

A client's group is the expert that it uses most: the largest q(z|s) of the assignment in metrics.jsonl, against
`Split.domains`. 1: the same groups; about 0: no better than chance. The second line groups clients with like q(z|s)
instead (average linkage, as many groups as there are): what could be read off before experts belong to one group each.

    python benchmarks/recovered_groups.py RUN...
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from fedmoe.partition.split import Split
from fedmoe.storage.rundir import RunDirectory


def recovered(folder: Path) -> tuple[list[float], list[float]]:
    """One index per round, by the expert used most and by like q(z|s); 0 where all clients are in one group."""
    run = RunDirectory(folder)
    domains = Split.load(run.split).domains
    if domains is None:
        raise SystemExit(f"{folder}: the split has no groups to recover; use split.kind = 'permutation'.")
    by_expert, by_likeness = [], []
    likeness = AgglomerativeClustering(n_clusters=len(np.unique(domains)), linkage="average")
    for event in run.read_metrics():
        assignment = event.get("experts", {}).get("assignment")
        if assignment and assignment["of"] == "client":
            usage = np.array(assignment["shares"])
            true = domains[: len(usage)]
            by_expert.append(float(adjusted_rand_score(true, usage.argmax(1))))
            by_likeness.append(float(adjusted_rand_score(true, likeness.fit_predict(usage))))
    return by_expert, by_likeness


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for how, indices in zip(("expert used most", "like q(z|s)"), recovered(path), strict=True):
            print(f"{path.name}, {how}: " + " ".join(f"{index:.2f}" for index in indices))
