"""What a sweep would cost on this machine: a round is timed, and what comes after the rounds is counted in rounds.

Clients that personalise or train alone do the same work per example as in a round, up to their limit of epochs; early
stopping makes it less, so the estimate is an upper one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedmoe.config import ExperimentConfig
from fedmoe.engines.embedded import default_workers
from fedmoe.errors import FedmoeError
from fedmoe.explain import explain
from fedmoe.storage.files import make_private_folder, read_bytes, write_atomically
from fedmoe.sweeps.plan import Cell, rounds_key

USUAL_STOP = 0.3  # of the epochs allowed, where training stops early


class Cost(NamedTuple):
    seconds: float | None  # of the whole sweep, all cores busy; None where it cannot be timed
    why: str = ""


def estimate(cells: Sequence[Cell], store: Path, name: str) -> Cost:
    """Timed once for each name; what was measured is kept in `store`."""
    known = _read(store)
    if name not in known:
        try:
            known[name] = _measure(cells)
        except FedmoeError as error:
            return Cost(None, str(error))
        make_private_folder(store.parent)
        write_atomically(store, json.dumps(known, indent=1).encode())
    return Cost(known[name])


def _read(store: Path) -> dict[str, float]:
    try:
        found = json.loads(read_bytes(store))
    except (FileNotFoundError, ValueError):
        return {}
    return {name: float(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _measure(cells: Sequence[Cell]) -> float:
    """The first cell that has rounds is timed; the others are taken to cost the same per example."""
    talking = next((cell for cell in cells if cell.config.algorithm.name != "local_only"), cells[0])
    engine = talking.config.engine.model_copy(update={"workers": 1})
    timed = explain(talking.config.model_copy(update={"engine": engine}))
    per_round = timed.seconds_per_round or 1.0
    seen: set[str] = set()
    total = 0.0
    for cell in cells:
        key = rounds_key(cell.config)
        if key is None or key not in seen:
            total += per_round * timed.rounds
        if key is not None:
            seen.add(key)
            total += per_round * _rounds_after(cell.config)
    return total / max(1, default_workers())


def _rounds_after(config: ExperimentConfig) -> float:
    """Personalising, in units of a round."""
    chosen = config.schedule.clients_per_round
    clients = getattr(config.split, "num_clients", None) or 100
    per_round = (clients if chosen == "all" else chosen) * (config.training.federated.epochs or 1)
    scored = config.evaluation.clients or clients
    return USUAL_STOP * scored * (config.training.personal.epochs or 1) / per_round
