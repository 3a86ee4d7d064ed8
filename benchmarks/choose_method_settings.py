"""Which settings the methods of `configs/methods_*.toml` get: chosen on validation data of clients of their own.

One rule for all: the one setting that a method's paper chooses or varies, out of the values there; each is trained for
`ROUNDS` rounds on Fashion-MNIST with a seed that no table uses, clients are scored on their own *validation* examples
in place of their test examples, and the highest mean accuracy on these after personalisation wins. What other
settings a method has stay at their defaults.

    FEDMOE_DATA=... python benchmarks/choose_method_settings.py RUNS

Runs that are finished in RUNS are not made again. Then:
python benchmarks/results_page.py store methods_settings RUNS/*.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from choose_fedmix_defaults import scored_on_validation

import fedmoe
from fedmoe.config import parse_config
from fedmoe.evaluation.answers import with_headline
from fedmoe.federations import build_federation

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "methods_fashion_mnist.toml"
SEED = 1000
ROUNDS = 400


class Server(NamedTuple):
    """A server optimizer."""

    name: str
    learning_rate: float

    def __str__(self) -> str:
        return f"{self.name} {self.learning_rate}"


# Method -> (setting, values). FedMix's values are those of choose_fedmix_defaults.py, which chose for other data and
# larger steps of the clients.
CANDIDATES: dict[str, tuple[str, list[Any]]] = {
    "fedprox": ("algorithm.proximal_strength", [0.001, 0.01, 0.1, 1.0]),
    "scaffold": ("training.federated.learning_rate", [0.003, 0.01, 0.03, 0.1]),
    "ditto": ("algorithm.personal_pull", [0.1, 1.0, 2.0]),
    "apfl": ("algorithm.alpha", [0.25, 0.5, 0.75]),
    "fedrep": ("algorithm.head_epochs", [3, 10]),
    "ifca": ("algorithm.num_clusters", [2, 4]),
    "fedem": ("algorithm.num_components", [2, 3]),
    "knn_per": ("algorithm.num_neighbors", [5, 10, 20]),
    "fedmix": ("algorithm.server_optimizer", [Server("sgd", 1.0), Server("adam", 0.001), Server("adam", 0.01)]),
}


def settings(method: str, key: str, value: Any) -> dict[str, Any]:
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    del config["compare"]
    config |= {"name": f"choose-{method}-{value}", "seed": SEED, "engine": {"workers": 1}}
    config["algorithm"] = {"name": method, "label": f"{method}, {key.split('.')[-1]} = {value}"}
    config["schedule"]["rounds"] = ROUNDS
    if method == "scaffold":
        config["training"]["federated"]["optimizer"] = "sgd"
    *path, last = key.split(".")
    section = config
    for name in path:
        section = section[name]
    section[last] = value._asdict() if isinstance(value, Server) else value
    return config


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", type=Path)
    arguments.add_argument("--methods", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    asked = arguments.parse_args()
    federation = None
    for method in asked.methods:
        key, values = CANDIDATES[method]
        for value in values:
            folder = asked.runs / f"{method}-{value}".replace(" ", "-")
            if not (folder / "results.json").exists():
                config = parse_config(settings(method, key, value))
                federation = federation or scored_on_validation(build_federation(config).federation)
                fedmoe.run(config, federation=federation, directory=folder)
            print(method, key, value, own_accuracy(folder), sep="\t", flush=True)


def own_accuracy(folder: Path) -> str:
    """In percent, mean over the training clients that are scored, with what they end with."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    own = [score for score in with_headline(results)["scores"] if score["data"] == "own" and not score["unseen"]]
    last = "after" if any(score["model"] == "after" for score in own) else "before"
    return f"{100 * sum(s['accuracy'] for s in own if s['model'] == last) / sum(s['model'] == last for s in own):.2f}"


if __name__ == "__main__":
    main()
