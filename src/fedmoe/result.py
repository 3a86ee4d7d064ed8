"""What a run ends with: the facts and scores that results.json holds, and every client's personal model."""

import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.session import Session
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.evaluation.reliability import reliability_of
from fedmoe.report.page import scores_section
from fedmoe.report.text import client_rows, clients_text, headline, summary_text

SHOWN_CLIENTS = 200  # whose class counts a report can draw


@dataclass(frozen=True)
class Result:
    """`data` is what results.json holds."""

    data: dict[str, Any]
    directory: Path
    session: Session

    def summary(self) -> str:
        """What happened and how good it came out, as text: the mean over clients, and each client."""
        return "\n\n".join(
            [headline(self.data), summary_text([self.data]), clients_text(self.data), str(self.directory)]
        )

    def by_client(self) -> list[dict[str, Any]]:
        """How each client's final model does on its own test rows, as ``pandas.DataFrame`` takes it."""
        return client_rows(self.data)

    def __repr__(self) -> str:
        return f"<Result of {headline(self.data)}; in {self.directory}>"

    def _repr_html_(self) -> str:
        return scores_section([self.data])

    @property
    def scores(self) -> list[Score]:
        return [Score(**{"accuracy": math.nan, **score}) for score in self.data["scores"]]  # none in a regression

    @property
    def algorithm(self) -> Algorithm:
        return self.session.algorithm

    @property
    def federation(self) -> Federation:
        return self.session.federation

    @property
    def delivered(self) -> dict[ClientId, Tree]:
        """The last broadcast that each client received."""
        return self.session.delivered

    def personal_model(self, client: ClientId | str) -> PersonalModel:
        """The model that this client ends with: x -> probabilities."""
        return self.session.personal_model(self.federation.number_of(client))


def results_of(
    parts: Parts,
    session: Session,
    history: Sequence[dict[str, Any]],
    curve: Sequence[dict[str, Any]],
    scores: Sequence[Score],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """What results.json says of the settings, the rounds and their end; and the manifest, which has its own file."""
    config, federation = parts.config, parts.federation
    takes_part = np.zeros(federation.num_clients, dtype=bool)
    takes_part[federation.participants] = True
    opted_out = np.flatnonzero(~takes_part).tolist()
    abandoned = [record for record in history if record["abandoned"]]
    names = None if federation.names is None else dict(enumerate(federation.names))
    return {
        "name": config.name,
        "algorithm": config.algorithm.name,
        "title": parts.title,
        "task": parts.federation.task,
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
        "commit": source_commit(),
        "backend": parts.backend,
        "model_weights": parts.expert.num_weights,
        "scores": [score.as_dict() for score in scores],
        "answers": _answers(session.algorithm),
        "reliability": reliability_of(scores),
        "history": [_of_a_round(record) for record in history if record["phase"] == "round"],
        "assignment": next((known for e in reversed(history) if (known := e["experts"].get("assignment"))), None),
        "warnings": [f"round {record['round']}: {words}" for record in history for words in record["warnings"]],
        "rejected": sum(record["rejected"] for record in history),
        "abandoned_rounds": len(abandoned),
        "traffic": session.manifest.totals() | {"opted_out_clients": len(opted_out)},
        "curve": [{key: point[key] for key in point if key != "event"} for point in curve],
        "client_names": names,
        **_shown(parts),
        **facts,
        "manifest": {
            **session.manifest.as_dict(opted_out, names),
            "intermediate_evaluation": session.evaluation_manifest.for_checkpoint(),
            "privacy": parts.privacy.facts() if parts.privacy else None,
        },
    }


def _answers(algorithm: Algorithm) -> dict[str, Any]:
    """How to read the scores of an algorithm that answers in several ways."""
    candidates = [name for name, answer in algorithm.scored_answers.items() if answer.is_candidate]
    return {"headline": algorithm.headline, "candidates": candidates}


def _of_a_round(record: dict[str, Any]) -> dict[str, Any]:
    """The map of every round is in the metrics."""
    experts = {key: value for key, value in record["experts"].items() if key != "assignment"}
    return {key: record[key] for key in ("round", "reports", "rejected", "seconds")} | {"experts": experts}


def _shown(parts: Parts) -> dict[str, Any]:
    """What a report shows of who holds what. Where not everyone is asked for scores, opted-in records alone count."""
    source, federation = parts.source, parts.federation
    if federation.target_shape is not None:
        return {"split_digest": parts.data_digest, "class_counts": [], "class_names": []}
    if source.class_counts is not None and parts.config.evaluation.clients_asked == "all":
        counts, names = source.class_counts[:SHOWN_CLIENTS].tolist(), list(federation.class_names)
    else:
        counts = [
            federation.class_counts(client).tolist() for client in range(min(federation.num_clients, SHOWN_CLIENTS))
        ]
        names = list(federation.class_names) or [str(label) for label in range(federation.num_classes)]
    return {"split_digest": parts.data_digest, "class_counts": counts, "class_names": names}


def versions() -> dict[str, str]:
    return {"fedmoe": version("fedmoe"), "torch": torch.__version__, "python": platform.python_version()}


@cache
def source_commit() -> str | None:
    """Of the git checkout that this package is imported from, marked where files were changed; None elsewhere."""
    home = Path(__file__).resolve().parent
    try:
        asked = ["git", "-C", str(home), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
        tracked = ["git", "-C", str(home), "ls-files", "--error-unmatch", Path(__file__).name]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        ours = subprocess.run(
            tracked, capture_output=True, timeout=10
        )  # not a repository that merely holds our install
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == ours.returncode == 0 else None
