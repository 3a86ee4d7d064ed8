"""A finished run in a fresh process, without the federation: its results, and every client's personal model.

Networks of the model catalog and those that the config names are made again. A module or an algorithm that was passed
to `run` as such is passed again; what a run recorded of it must agree. No record of any client is read.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.assembly import Parts, build_without_data
from fedmoe.clients.facts import FederationFacts, read_facts
from fedmoe.config import ExperimentConfig, read_config
from fedmoe.engines.delivery import read_delivery
from fedmoe.engines.embedded import InProcess
from fedmoe.engines.session import Session
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError
from fedmoe.models.network import ModuleOrFactory
from fedmoe.paths import expanded
from fedmoe.result import Result
from fedmoe.resuming import newest_checkpoint, scored_clients, steps_in
from fedmoe.storage.files import read_bytes
from fedmoe.storage.finished import changed_since_finished
from fedmoe.storage.results import read_results
from fedmoe.storage.rundir import RunDirectory


def load(
    directory: str | Path,
    *,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
) -> Result:
    """A finished run. What was passed to `run`, a module or an algorithm, is passed again.

    Its personal models predict bit for bit what those of the run predicted.
    """
    run = RunDirectory(expanded(directory))
    recorded = _finished_run(run)
    config = _with_own_common_expert(read_config(run.config, algorithm=algorithm), run, recorded, common_expert)
    parts = build_without_data(config, _facts(run), expert, gate, common_expert)
    _require_recorded_modules(run, recorded, parts)
    _require_recorded_common_expert(run, recorded, parts)
    _require_models_here(run, parts)
    worker = Worker(parts, run.private_store, recorded["run_id"])
    session = Session(parts, InProcess(worker))
    _go_to_the_end(run, recorded["run_id"], session)
    worker.close()
    return Result(read_results(run.path), run.path, session)


def _finished_run(run: RunDirectory) -> dict[str, Any]:
    """What its config has under `recorded`."""
    try:
        recorded: dict[str, Any] = run.read_config()["recorded"]
    except FileNotFoundError:
        raise RunError(
            f"{run.path} holds no run (config.toml is missing). Name the folder of one, such as runs/digits."
        ) from None
    changed = changed_since_finished(run, recorded["run_id"])
    if changed is None:
        raise RunError(f"the run in {run.path} is not finished. Run it to its end first: fedmoe run {run.config}.")
    if changed:
        raise RunError(
            f"{' and '.join(changed)} in {run.path} changed after the run ended, so it is not clear what they belong "
            "to. Put them back, or run the same command again with the clients' data."
        )
    return recorded


def _with_own_common_expert(
    config: ExperimentConfig, run: RunDirectory, recorded: dict[str, Any], given: nn.Module | None
) -> ExperimentConfig:
    """The copy in the folder serves: the file that the config named may be gone."""
    if config.common_expert is not None and run.common_expert.exists():
        chosen = config.common_expert.model_copy(update={"weights": run.common_expert})
        return config.model_copy(update={"common_expert": chosen})
    if "common_expert" in recorded and given is None:
        raise RunError(
            f"the run in {run.path} was given a common expert as a module. Pass it again: "
            "fedmoe.load(RUN, common_expert=...)."
        )
    return config


def _facts(run: RunDirectory) -> FederationFacts:
    try:
        table = json.loads(read_bytes(run.federation))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise RunError(
            f"{run.federation}, what the run recorded of its federation, cannot be read: {error}. Run the same command "
            "again with the clients' data: a finished run writes it and computes nothing anew."
        ) from error
    return read_facts(table, str(run.federation))


def _require_recorded_modules(run: RunDirectory, recorded: dict[str, Any], parts: Parts) -> None:
    for network in (parts.expert, parts.gate):
        name = network.name
        again = f"Pass the one that the run was given: fedmoe.load(RUN, {name}=...), or --{name} package.module:factory"
        if network.fingerprint != recorded["modules"][name]:
            raise RunError(
                f"this {name} is not the one that the run in {run.path} was trained with: its structure differs "
                f"(fingerprint {network.fingerprint[:8]}, recorded {recorded['modules'][name][:8]}). {again}."
            )
        if network.frozen_digest != recorded["frozen_weights"][name]:
            raise RunError(
                f"the frozen weights or buffers of this {name} are not those that the run in {run.path} was trained "
                f"with. {again}, with the same pretrained weights."
            )


def _require_recorded_common_expert(run: RunDirectory, recorded: dict[str, Any], parts: Parts) -> None:
    if recorded.get("common_expert") != parts.weights_digests.get("common_expert"):
        raise RunError(
            f"this common expert is not the one that the run in {run.path} was made with: its weights differ. Pass the "
            "same one, or put common_expert.safetensors back."
        )


def _require_models_here(run: RunDirectory, parts: Parts) -> None:
    if parts.config.engine.on_silos and (parts.algorithm.keeps_client_state or parts.algorithm.personalize):
        raise RunError(
            f"the run in {run.path} was made on silos: each personal model is on its client's own node and does not "
            "leave it. `fedmoe flower personalize` leaves it there as model.pt2, which runs without fedmoe."
        )


def _go_to_the_end(run: RunDirectory, run_id: str, session: Session) -> None:
    """As if the session had just finished: server state, state versions, and what every client was delivered."""
    checkpoint, passed_over = newest_checkpoint(run, run_id, session, set_aside=False)
    reached = checkpoint.round if checkpoint else 0
    if reached != session.num_steps:
        why = f" ({' '.join(passed_over)})" if passed_over else ""
        raise RunError(
            f"the last checkpoint of {run.path} is not there: {reached} of {session.num_steps} steps are{why}. Run the "
            "same command again with the clients' data."
        )
    if checkpoint:
        session.resume(checkpoint.round, checkpoint.server, steps_in(run, checkpoint))
    *questions, _last = session.algorithm.delivery
    replies = read_delivery(run.delivery, questions) if questions else None
    federation = session.federation
    session.deliver(scored_clients(session.config, federation.num_clients, federation.num_unseen), replies)
