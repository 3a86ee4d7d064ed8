"""How well a run recovered the true groups of its clients: the adjusted Rand index after every round.

A client's group is the expert that it uses most: the largest q(z|s) of the assignment in metrics.jsonl, against
`Split.domains`. 1: the same groups; about 0: no better than chance. The second line groups clients with like q(z|s)
instead (average linkage, as many groups as there are): what could be read off before experts belong to one group each.

    python benchmarks/recovered_groups.py RUN...
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from fedmoe.partition.split import Split
from fedmoe.storage.rundir import RunDirectory

HOW = ("expert used most", "like q(z|s)")


def usage_of(folder: Path) -> dict[str, Any] | None:
    """The true group of each client, and q(z|s) of all of them after every round; None where a run has neither."""
    run = RunDirectory(folder)
    domains = Split.load(run.split).domains if run.split.exists() else None
    found = [event["experts"].get("assignment") for event in run.read_metrics() if event.get("experts")]
    usage = [assignment["shares"] for assignment in found if assignment and assignment["of"] == "client"]
    return {"groups": domains[: len(usage[0])].tolist(), "usage": usage} if domains is not None and usage else None


def recovered(groups: Sequence[int], usage: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], list[float]]:
    """One index per round, by the expert used most and by like q(z|s); 0 where all clients are in one group."""
    likeness = AgglomerativeClustering(n_clusters=len(np.unique(groups)), linkage="average")
    rounds = [np.array(shares) for shares in usage]
    by_expert = [float(adjusted_rand_score(groups, shares.argmax(1))) for shares in rounds]
    return by_expert, [float(adjusted_rand_score(groups, likeness.fit_predict(shares))) for shares in rounds]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        known = usage_of(path)
        if known is None:
            raise SystemExit(f"{path}: there are no groups to recover; use split.kind = 'permutation' and fedmix.")
        for how, indices in zip(HOW, recovered(**known), strict=True):
            print(f"{path.name}, {how}: " + " ".join(f"{index:.2f}" for index in indices))
