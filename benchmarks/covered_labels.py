"""How many labels of an unseen client the experts that it was sent know, and how well it is answered (FedJETs).

An expert knows the labels of its anchor client, which trains it alone. Prints a line for each unseen client that tests,
as a table in Markdown. Needs the data that the run was made on.

    FEDMOE_DATA=... python benchmarks/covered_labels.py RUN...
"""

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from fedmoe.clients.federation import Federation
from fedmoe.config import read_config
from fedmoe.core_types import ClientId
from fedmoe.errors import RunError
from fedmoe.federations import build_federation
from fedmoe.report.expert_figures import ACCURACY_OF
from fedmoe.storage.results import read_results


class Covered(NamedTuple):
    client: ClientId
    experts: list[int]
    known: int  # of its labels
    knowable: int  # by the best choice of as many experts
    labels: int
    accuracy: float
    common_accuracy: float


def covered(folder: Path) -> Iterator[Covered]:
    config, results = read_config(folder / "config.toml"), read_results(folder)
    if config.schedule.anchors is None:
        raise RunError(f"{folder}: no expert has an anchor; use a run with schedule.anchors.")
    federation = build_federation(config).federation
    labels_of_expert = [labels(federation, m) for m in range(config.schedule.anchors.number)]
    for score in results["scores"]:
        if score["unseen"] and score["data"] == "own" and score["model"] == "after" and not score.get("answer"):
            metrics = score["metrics"]
            experts = [int(name.removeprefix(ACCURACY_OF)) for name in metrics if name.startswith(ACCURACY_OF)]
            own = set(federation.load(score["client"]).test.y.unique().tolist())
            choices = combinations(range(len(labels_of_expert)), len(experts))
            known = {chosen: len(own & set().union(*(labels_of_expert[m] for m in chosen))) for chosen in choices}
            accuracies = score["accuracy"], metrics["common_accuracy"]
            sent = known[tuple(sorted(experts))]
            yield Covered(score["client"], experts, sent, max(known.values()), len(own), *accuracies)


def labels(federation: Federation, client: ClientId) -> set[int]:
    return set(federation.load(client).train.y.unique().tolist())


def main() -> None:
    print("| run | client | experts | labels known | at best | accuracy | of the common expert |")
    print("|---|---|---|---|---|---|---|")
    for folder in map(Path, sys.argv[1:]):
        for one in sorted(covered(folder), key=lambda one: one.known):
            known = f"{one.known} of {one.labels} | {one.knowable}"
            shares = f"{100 * one.accuracy:.1f} | {100 * one.common_accuracy:.1f}"
            print(f"| {folder.name} | {one.client} | {', '.join(map(str, one.experts))} | {known} | {shares} |")


if __name__ == "__main__":
    main()
