"""What the shared model of a run says, and how large the gradients were that made it (Peterson et al. 2019).

Tables 1 and 2 there ask how often two runs answer differently on the 100 mails that belong to nobody, over restarts and
with one user left out. Figure 7 is the mean norm of the gradients that users sent, round by round.

    FEDMOE_DATA=... python benchmarks/shared_model.py OUT.json RUN...     # of many runs, without their scores
"""

import argparse
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

import fedmoe
from fedmoe.config import read_config
from fedmoe.core_types import Examples
from fedmoe.federations import build_federation
from fedmoe.storage.rundir import RunDirectory

DIGITS = 4

Run = dict[str, Any]


def shared_model_of(folder: Path) -> Run:
    """The answers on the global test as a string of classes, how many are right, and the norms; of finished runs."""
    result = fedmoe.load(folder)
    norms = gradient_norms(folder)
    if not result.algorithm.round or result.algorithm.measure or not norms:
        return {}
    test = global_test(RunDirectory(folder).config)
    shared, state = result.delivered[0], None
    with torch.no_grad():
        answers: Tensor = result.algorithm.predict(shared, state, None, test.x).argmax(1)
    right = float((answers == test.y).float().mean())
    return {"answers": "".join(map(str, answers.tolist())), "shared_accuracy": right, "gradient_norms": norms}


def gradient_norms(folder: Path) -> list[float]:
    events = RunDirectory(folder).read_metrics()
    found = [event["reports"].get("gradient_norm") for event in events if event.get("phase") == "round"]
    return [float(f"{norm:.{DIGITS}g}") for norm in found if norm is not None]


@lru_cache(maxsize=2)
def _global_test(data: str) -> Examples:
    return build_federation(fedmoe.config.parse_config(json.loads(data))).federation.global_test


def global_test(config: Path) -> Examples:
    """Of the same data and split: read once for many runs."""
    chosen = read_config(config).model_dump(mode="json", include={"data", "split"})
    return _global_test(json.dumps(chosen))


def disagreement(runs: Sequence[Run]) -> tuple[float, float]:
    """P(two runs answer differently), mean and deviation over all pairs of runs."""
    shares = [
        fmean(one != other for one, other in zip(first["answers"], second["answers"], strict=True))
        for first, second in combinations(runs, 2)
    ]
    return fmean(shares), pstdev(shares)


def spread(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), pstdev(values)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("runs", nargs="+", type=Path)
    asked = arguments.parse_args()
    rows = []
    for folder in asked.runs:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        config = results["config"]
        privacy = config.get("privacy") or {}
        level = privacy.get("target_epsilon") or ("∞" if not privacy else f"σ = {privacy['noise_multiplier']:g}")
        facts = {"title": results["title"], "level": level, "seed": results["seed"]}
        left_out = config["opt_out"]["clients"]
        rows.append({**facts, "left_out": left_out, "commit": results["commit"], **shared_model_of(folder)})
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    asked.out.write_text(f"[\n {lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
