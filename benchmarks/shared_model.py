"""What Peterson, Kanani and Marathe (2019) measure beside scores, read from finished runs.

Tables 1 and 2: the answers of the shared model on the 100 mails that belong to nobody. Figure 7: the mean norm of the
gradients that users sent, round by round. Figure 4: the gates of the two users of the synthetic regression.

    FEDMOE_DATA=... python benchmarks/shared_model.py OUT.json RUN...     # of many runs, without their scores
"""

import argparse
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import fedmoe
from fedmoe.config import parse_config
from fedmoe.core_types import Examples
from fedmoe.federations import build_federation
from fedmoe.result import Result
from fedmoe.storage.rundir import RunDirectory

DIGITS = 4

Facts = dict[str, Any]


def facts_of(folder: Path) -> Facts:
    """Nothing of runs that report no size of gradients."""
    events = RunDirectory(folder).read_metrics()
    norms = [event["reports"].get("gradient_norm") for event in events if event.get("phase") == "round"]
    if not norms or norms[0] is None:
        return {}
    result = fedmoe.load(folder)
    found = {"gradient_norms": [float(f"{norm:.{DIGITS}g}") for norm in norms]}
    return found | (gates_of(result) if result.data["task"] == "regression" else answers_of(result))


def answers_of(result: Result) -> Facts:
    """Of the shared model alone on the global test, one digit per mail; how many are right."""
    config = result.data["config"]
    test = global_test(json.dumps({"data": config["data"], "split": config["split"]}))
    with torch.no_grad():
        answers = result.algorithm.predict(result.delivered[0], None, None, test.x).argmax(1)
    right = round(float((answers == test.y).float().mean()), DIGITS)
    return {"shared_answers": "".join(map(str, answers.tolist())), "shared_accuracy": right}


@lru_cache(maxsize=1)
def global_test(sections: str) -> Examples:
    return build_federation(parse_config(json.loads(sections))).federation.global_test


def gates_of(result: Result) -> Facts:
    """Of each user the weights and the bias of a linear gate; nothing where there is none."""
    gates = []
    for client in range(result.federation.num_clients):
        tensors = result.personal_model(client).state_dict()
        names = [name for name in sorted(tensors) if name.removeprefix("personal_").startswith("gate.")]
        found = [tensors[name].flatten().tolist() for name in names]
        gates.append([round(number, DIGITS) for part in reversed(found) for number in part])
    return {"gates": gates} if all(gates) else {}


def level_of(config: Facts) -> str:
    """How much noise: an epsilon, or a multiplier."""
    privacy = config.get("privacy") or {}
    if not privacy:
        return "∞"
    if privacy["target_epsilon"] is not None:
        return f"{privacy['target_epsilon']:g}"
    return f"σ = {privacy['noise_multiplier']:g}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("runs", nargs="+", type=Path)
    arguments.add_argument("--commit", required=True, help="of the code that made the runs")
    asked = arguments.parse_args()
    rows = []
    for folder in asked.runs:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        config = results["config"]
        which = {"title": results["title"].split(",")[0], "level": level_of(config), "seed": results["seed"]}
        rows.append({**which, "left_out": config["opt_out"]["clients"], "commit": asked.commit, **facts_of(folder)})
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    asked.out.write_text(f"[\n {lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
