"""Which server optimizer FedMix gets by default: chosen on validation data of several data sets, never on test data.

Every data set is split over clients, and FedMix with each candidate (FedAvg beside it) is trained for the same rounds.
A client's score is measured on its own validation examples: the federation is handed over with these in the place of
the test examples, which nothing here ever reads. No candidate chooses a round by them, or stops early by them.

    FEDMOE_DATA=... python benchmarks/choose_fedmix_defaults.py RUNS [--data NAME ...] [--seeds 0,1]

Runs that are finished in RUNS are not made again. Then: python benchmarks/results_page.py store fedmix_defaults RUNS/*.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedmoe
from fedmoe.clients.federation import Federation, Records
from fedmoe.config import parse_config
from fedmoe.core_types import ClientId
from fedmoe.federations import build_federation

ROUNDS = 40
SGD = {"optimizer": "sgd", "epochs": 1, "batch_size": 20, "learning_rate": 0.05}
ADAM = {
    "optimizer": "adam",
    "epochs": 1,
    "batch_size": 10,
    "learning_rate": 1e-3,
}  # the default of `training.federated`
SIZES = {"num_clients": 30, "train_size": 200, "validation_size": 100, "test_size": 1, "global_test_size": 10}
LENET = {"name": "lenet", "channels": [6, 16], "dense": [64]}

# Label skew, input skew and both; small and larger models; clients that train with SGD and with Adam.
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"name": "digits"},
        "split": {
            **SIZES, "kind": "majority", "share": 0.7, "num_clients": 12, "train_size": 25, "validation_size": 35,
        },
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"federated": {**SGD, "epochs": 3, "batch_size": 10, "learning_rate": 0.1}},
    },
    "mnist_by_writer": {
        "data": {"name": "mnist_by_writer"},
        "split": {
            "kind": "natural", "field": "writer", "num_clients": 40, "min_size": 100, "validation_share": 0.4,
            "test_share": 0.05, "global_test_size": 10,
        },
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"federated": ADAM},
    },
    "rotated_mnist": {
        "data": {"name": "mnist"},
        "split": {**SIZES, "kind": "rotation", "num_angles": 4},
        "model": LENET,
        "training": {"federated": SGD},
    },
    "fashion_mnist": {
        "data": {"name": "fashion_mnist"},
        "split": {**SIZES, "kind": "dirichlet", "alpha": 0.5, "equal_sizes": True},
        "model": LENET,
        "training": {"federated": ADAM},
    },
    "cifar10": {
        "data": {"name": "cifar10"},
        "split": {**SIZES, "kind": "majority", "share": 0.6},
        "model": LENET,
        "training": {"federated": SGD},
    },
}  # fmt: skip

CANDIDATES: dict[str, dict[str, Any]] = {
    "SGD 1 (averaging)": {"name": "sgd", "learning_rate": 1.0},
    "SGD 1, momentum 0.5": {"name": "sgd", "learning_rate": 1.0, "momentum": 0.5},
    "Adam 0.001": {"name": "adam", "learning_rate": 0.001},
    "Adam 0.003": {"name": "adam", "learning_rate": 0.003},
    "Adam 0.01": {"name": "adam", "learning_rate": 0.01},
    "Adam 0.03": {"name": "adam", "learning_rate": 0.03},
}


def methods() -> dict[str, dict[str, Any]]:
    """FedAvg with Adam too: a server optimizer that helps one of the two may well help the other."""
    fedavg = {"name": "fedavg", "label": "FedAvg", "validate_every": ROUNDS}
    stepped = {**fedavg, "label": "FedAvg, Adam 0.01", "server_optimizer": CANDIDATES["Adam 0.01"]}
    mixtures = [
        {"name": "fedmix", "label": f"FedMix, {label}", "server_optimizer": optimizer}
        for label, optimizer in CANDIDATES.items()
    ]
    return {method["label"]: method for method in (fedavg, stepped, *mixtures)}


def settings(task: str, method: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "name": task,
        "seed": seed,
        **TASKS[task],
        "training": {**TASKS[task]["training"], "personal": {"epochs": 1}},
        "algorithm": method,
        "schedule": {"rounds": ROUNDS, "clients_per_round": 10, "checkpoint_every": ROUNDS},
        "engine": {"workers": 1},
    }


def scored_on_validation(federation: Federation) -> Federation:
    """The same clients; their test examples are left out, and they are scored on their validation examples instead."""

    def load(client: ClientId) -> Records:
        own = federation.load(client)
        return Records(own.train, own.validation, own.validation, own.train_opted_in, own.validation_opted_in)

    return replace(federation, load=load, digest=f"{federation.digest} on validation data")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", type=Path)
    arguments.add_argument("--data", nargs="*", choices=list(TASKS), default=list(TASKS))
    arguments.add_argument("--seeds", default="0,1")
    asked = arguments.parse_args()
    for task in asked.data:
        for seed in map(int, asked.seeds.split(",")):
            federation = None
            for label, method in methods().items():
                folder = asked.runs / f"{task}-{label.replace(' ', '_').replace(',', '')}-seed{seed}"
                if not (folder / "results.json").exists():
                    config = parse_config(settings(task, method, seed))
                    federation = federation or scored_on_validation(build_federation(config).federation)
                    fedmoe.run(config, federation=federation, directory=folder)
                print(task, seed, label, *summary(folder), sep="\t", flush=True)


def summary(folder: Path) -> tuple[str, str]:
    """Accuracy in percent and loss, mean over clients, with the model of the last round."""
    results = json.loads((folder / "results.json").read_text())
    own = [score for score in results["scores"] if score["data"] == "own" and score["model"] == "before"]
    accuracy, loss = (sum(score[key] for score in own) / len(own) for key in ("accuracy", "loss"))
    return f"{100 * accuracy:.1f}", f"{loss:.3f}"


if __name__ == "__main__":
    main()
