"""What a run ends with: the facts and scores that results.json holds, and every client's personal model."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import find
from fedmoe.clients.federation import Federation
from fedmoe.clients.private_store import PrivateStore
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.worker import newest_version
from fedmoe.errors import RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.storage.rundir import RunDirectory


@dataclass(frozen=True)
class Result:
    """`data` is what results.json holds."""

    data: dict[str, Any]
    directory: Path
    algorithm: Algorithm
    federation: Federation
    kept: dict[ClientId, Tree]
    clock: int

    @property
    def scores(self) -> list[Score]:
        return [Score(**score) for score in self.data["scores"]]

    def personal_model(self, client: ClientId | str) -> PersonalModel:
        """The model that this client ends with: x -> probabilities."""
        number = self.federation.number_of(client)
        if number not in self.kept:
            raise RunError(f"client {client} was not personalised: evaluation.clients left it out.")
        run = RunDirectory(self.directory)
        store = PrivateStore(run.private_store, run.read_config()["recorded"]["run_id"])
        version = newest_version(store, "client", number, self.clock + 1)
        client_state = (
            self.algorithm.init_client(self.kept[number], number, self.data["seed"])
            if version is None
            else store.load("client", self.algorithm.client_type, number, version)
        )
        has_personal = self.algorithm.personalize and store.have("final", {number: self.clock})
        personal = store.load("final", self.algorithm.personal_type, number, self.clock) if has_personal else None
        store.close()
        parts = {"broadcast": self.kept[number], "client": client_state, "personal": personal}
        return PersonalModel(self.algorithm.predict, parts)


def results_of(config: ExperimentConfig, history: Sequence[dict[str, Any]], scores: Sequence[Score]) -> dict[str, Any]:
    """What results.json says of the settings, the rounds and their end."""
    return {
        "name": config.name,
        "algorithm": config.algorithm.name,
        "title": config.algorithm.label or find(config.algorithm.name).title,
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
        "scores": [score._asdict() for score in scores],
        "history": [_told(event) for event in history],
        "assignment": next((known for e in reversed(history) if (known := e["experts"].get("assignment"))), None),
        "warnings": [f"round {event['round']}: {words}" for event in history for words in event["warnings"]],
    }


def _told(event: dict[str, Any]) -> dict[str, Any]:
    """What results.json says of a round; the map of every round is in the metrics."""
    experts = {key: value for key, value in event["experts"].items() if key != "assignment"}
    return {key: event[key] for key in ("round", "reports", "refused", "seconds")} | {"experts": experts}


def versions() -> dict[str, str]:
    return {"fedmoe": version("fedmoe"), "torch": torch.__version__, "python": platform.python_version()}
