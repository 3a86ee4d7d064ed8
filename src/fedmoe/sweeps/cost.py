"""What a sweep would cost on this machine: rounds of each algorithm are timed, and the rest is counted in examples.

A cell costs what its examples do: those of the rounds, of common experts, of what clients train afterwards and are
scored on. Early stopping is guessed, and cells side by side slow each other down: it is an order of magnitude.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fedmoe.comparison import rounds_key
from fedmoe.config import ExperimentConfig
from fedmoe.engines.embedded import default_workers
from fedmoe.errors import FedmoeError, RunError
from fedmoe.explain import explain
from fedmoe.storage.files import make_private_folder, read_bytes, write_atomically
from fedmoe.sweeps.plan import Cell
from fedmoe.sweeps.preparation import untrained_common_expert

CELL_SECONDS = 3.0  # to read the data and to write the results, whatever is between them
USUAL_STOP = 0.3  # of the epochs allowed, where training stops early
FORWARD = 0.35  # of an example that is scored, against one that is learnt from
ALONE = ("local_only", "common_expert")  # nobody talks
TRAINED_AFTERWARDS = {"fine_tuned": 1.0, "specialist_mixture": 2.5, "local_global_mixture": 3.5}  # in networks
USUAL_CLIENTS, USUAL_EXAMPLES = 100, 100  # where the data say it


class Cost(NamedTuple):
    seconds: float | None  # of the whole sweep, all cores busy; None where it cannot be timed
    why: str = ""


class Rates:
    """Seconds per example by algorithm, network and data; each is timed when first asked for, and kept in a file."""

    def __init__(self, store: Path, patience: float = math.inf) -> None:
        """Nothing more is timed after `patience` seconds: what is not known then is left to another call."""
        self.store, self.until = store, time.monotonic() + patience
        try:
            found = json.loads(read_bytes(store))
            self.known = {str(key): float(value) for key, value in found.items()}
        except (FileNotFoundError, AttributeError, TypeError, ValueError):
            self.known = {}

    def of(self, config: ExperimentConfig) -> float:
        algorithm = config.algorithm.entry.rounds or config.algorithm.name
        table = config.model_dump(mode="json", include={"model", "data", "privacy"})
        table["model"] = {key: value for key, value in table["model"].items() if key != "start_from"}
        digest = hashlib.blake2b(json.dumps(table, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
        key = f"{algorithm}, {config.data.name}, {config.model.name}, {digest}"
        if key not in self.known:
            if time.monotonic() > self.until:
                raise RunError("not timed yet. Run the same command again to time more")
            self.known[key] = _seconds_per_example(config)
            make_private_folder(self.store.parent)
            write_atomically(self.store, json.dumps(self.known, indent=1).encode())
        return self.known[key]


def estimate(cells: Sequence[Cell], rates: Rates, pretrain_epochs: int | None = None) -> Cost:
    """Every algorithm is timed on the first cell that asks; one that never talks costs as the first that does."""
    try:
        return Cost(_seconds(cells, rates, pretrain_epochs or 0) / max(1, default_workers()))
    except FedmoeError as error:
        return Cost(None, str(error))


def _seconds(cells: Sequence[Cell], rates: Rates, pretrain_epochs: int) -> float:
    talking = [cell.config for cell in cells if cell.config.algorithm.name not in ALONE]
    trained: set[str] = set()
    commons: set[Path] = set()
    total = 0.0
    for cell in cells:
        config, key = cell.config, rounds_key(cell.config)
        talks = config.algorithm.name not in ALONE
        examples = _afterwards(config) + _scored(config)
        if talks and (key is None or key not in trained):
            examples += config.schedule.rounds * _in_a_round(config)
        trained.add(key or "")
        common = config.common_expert
        if common is not None and common.weights not in commons:
            commons.add(common.weights)
            examples += pretrain_epochs * getattr(config.split, "public_size", 0)
        total += CELL_SECONDS + examples * rates.of(config if talks or not talking else talking[0])
    return total


def _seconds_per_example(config: ExperimentConfig) -> float:
    engine = config.engine.model_copy(update={"workers": 1})
    with TemporaryDirectory() as folder:
        ready = untrained_common_expert(config.model_copy(update={"engine": engine}), Path(folder))
        return (explain(ready).seconds_per_round or 1.0) / _in_a_round(config)


def _clients(config: ExperimentConfig) -> int:
    return getattr(config.split, "num_clients", None) or USUAL_CLIENTS


def _train_size(config: ExperimentConfig) -> int:
    return getattr(config.split, "train_size", None) or USUAL_EXAMPLES


def _in_a_round(config: ExperimentConfig) -> float:
    """Examples that clients learn from, once for every network that they train on them."""
    chosen, plan, options = config.schedule.clients_per_round, config.training.federated, config.algorithm.options()
    clients = _clients(config) if chosen == "all" else chosen
    each = plan.steps * plan.batch_size if plan.steps is not None else plan.epochs * _train_size(config)
    found = (getattr(options, name, None) for name in ("num_sent", "num_experts", "num_components"))
    networks = 2 if config.algorithm.name == "average_ensembles" else next(filter(None, found), 1)
    return float(clients * each * networks)


def _afterwards(config: ExperimentConfig) -> float:
    """Examples that scored clients train on alone, up to the usual early stop."""
    scored, name = config.evaluation.clients or _clients(config), config.algorithm.name
    plan = config.training.local if name == "local_only" else config.training.personal
    networks = 1.0 if name == "local_only" else TRAINED_AFTERWARDS.get(name, 0.0)
    return networks * USUAL_STOP * scored * _train_size(config) * (plan.epochs or 1)


def _scored(config: ExperimentConfig) -> float:
    scored, every = config.evaluation.clients or _clients(config), config.evaluation.every
    times = 2 + (config.schedule.rounds // every if every else 0)
    sizes = [getattr(config.split, name, None) or 0 for name in ("test_size", "global_test_size")]
    return FORWARD * times * scored * sum(sizes)
