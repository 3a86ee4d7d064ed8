"""A session and its folder: what makes a run the same run, what a checkpoint holds, and which one is gone on from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmoe.assembly import Parts
from fedmoe.clients.facts import facts_of
from fedmoe.clients.privacy_ledger import check_ledger, ledger_beside
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Session
from fedmoe.engines.steps import STEPS
from fedmoe.errors import RunError
from fedmoe.result import versions
from fedmoe.storage.checkpoints import Checkpoint, drop_from, load_newest, oldest_round, save_checkpoint
from fedmoe.storage.finished import unmark_finished
from fedmoe.storage.rundir import RunDirectory
from fedmoe.streams import numpy_stream

# Sections that gain settings from version to version; none of these is None but by default.
GROWING = {"training", "schedule", "evaluation", "engine"}


def extend_run(run: RunDirectory, parts: Parts) -> bool:
    """Let the run here, finished or not, have more rounds than it was begun with; whether it now has.

    The last round of a run is not like the others: it is validated whatever its number is, and what follows it changes
    the server too. So it is computed again, from the checkpoint before it; only then is the run the same as one that
    had all rounds from the start.
    """
    try:
        begun_with = run.read_config()["schedule"]["rounds"]
    except FileNotFoundError:
        return False
    asked = parts.config.schedule.rounds
    if not isinstance(begun_with, int) or asked <= begun_with:
        return False
    schedule = parts.config.schedule.model_copy(update={"rounds": begun_with})
    record_run(run, replace(parts, config=parts.config.model_copy(update={"schedule": schedule})))  # else all the same
    _require_extendable(run, parts, begun_with)
    unmark_finished(run)
    drop_from(run.checkpoints, begun_with)
    run.record_rounds(asked)  # last: killed before this, the run still is what it was
    return True


def _require_extendable(run: RunDirectory, parts: Parts, begun_with: int) -> None:
    rates = parts.config.training.federated.rate_over_rounds
    if rates is not None and rates.depends_on_total:
        raise RunError(
            f"{run.path} was begun with {begun_with} rounds, and its learning rate falls over all of them "
            "(training.federated.rate_over_rounds): with more rounds every one would be another. Choose another "
            "directory (--dir); with rate_over_rounds.over set, a run can go on."
        )
    if parts.privacy is not None:
        raise RunError(
            f"{run.path} was begun with {begun_with} rounds, and the budget of its section [privacy] is planned for so "
            "many. Choose another directory (--dir) for more."
        )
    if stopped := next((event for event in run.read_metrics() if event["event"] == "stopped"), None):
        raise RunError(
            f"{run.path} ended after round {stopped['round']}, since {stopped['reason']}: it would end there with more "
            "rounds, too. Choose another directory (--dir) and other settings."
        )


def record_run(run: RunDirectory, parts: Parts) -> str:
    """Record what makes this run what it is, or check that the folder belongs to the same; the run's id."""
    recorded = {
        "split_digest": parts.data_digest,
        "modules": {network.name: network.fingerprint for network in (parts.expert, parts.gate)},
        "frozen_weights": {network.name: network.frozen_digest for network in (parts.expert, parts.gate)},
        **parts.weights_digests,
        "versions": versions(),
    }
    asked = {**parts.config.model_dump(mode="json"), "recorded": recorded}
    known = run.record_config(asked, ExperimentConfig().model_dump(mode="json", include=GROWING))
    run.write_json(run.federation, facts_of(parts.federation).as_json())
    run_id: str = known["recorded"]["run_id"]
    return run_id


def scored_clients(config: ExperimentConfig, num_clients: int, num_unseen: int) -> list[ClientId]:
    """Who is delivered a model and scored: everyone, or a seeded draw of the training clients; new clients always."""
    everyone: Sequence[ClientId] = range(num_clients)
    wanted = config.evaluation.clients
    if wanted is not None and wanted < len(everyone):
        rng = numpy_stream(config.seed, "evaluated clients")
        everyone = sorted(rng.choice(len(everyone), wanted, replace=False, shuffle=False).tolist())
    return [*everyone, *range(num_clients, num_clients + num_unseen)]


def checkpoint_session(run: RunDirectory, run_id: str, session: Session) -> None:
    note = {
        "manifest": session.manifest.for_checkpoint(),
        "evaluation": session.evaluation_manifest.for_checkpoint(),
        "metrics": run.metrics_state(),
        "ended_after": session.ended_after,
        "rounds_field": session.algorithm.rounds_field,
    }
    save_checkpoint(run.checkpoints, Checkpoint(session.step, session.server, note), run_id, session.num_rounds)
    session.drop_superseded(oldest_round(run.checkpoints))


def newest_checkpoint(
    run: RunDirectory, run_id: str, session: Session, *, set_aside: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """The newest one whose metrics and private states are there; sentences about those that were passed over.

    The session plans as many rounds as there were where this one was made.
    """

    def unusable(checkpoint: Checkpoint) -> str | None:
        session.plan_rounds(checkpoint.note.get("ended_after"))
        return run.check_metrics(*checkpoint.note["metrics"]) or _missing_states(run, session, checkpoint)

    found, notes = load_newest(run.checkpoints, session.algorithm.server_type, run_id, unusable, set_aside=set_aside)
    if found is None:
        session.plan_rounds(None)
    return found, notes


def _missing_states(run: RunDirectory, session: Session, checkpoint: Checkpoint) -> str | None:
    """Why the private states are not those that the checkpoint relies on, or None."""
    if not session.algorithm.keeps_client_state:
        return None
    missing = session.missing_states(steps_in(run, checkpoint))
    return f"relies on private states of clients {missing[:5]} that are not there" if missing else None


def steps_in(run: RunDirectory, checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """The records of all steps up to a checkpoint, from the metrics that it vouches for."""
    return [event for event in run.read_metrics(checkpoint.note["metrics"][0]) if event["event"] in STEPS]


def resume_session(run: RunDirectory, session: Session, checkpoint: Checkpoint | None) -> list[dict[str, Any]]:
    """Bring a session to where the checkpoint left it; the events up to there. What came after is computed again."""
    run.truncate_metrics(checkpoint.note["metrics"][0] if checkpoint else 0)
    if checkpoint is None:
        return []
    records = steps_in(run, checkpoint)
    if session.parts.privacy and session.transport.one_store:
        rounds = ((record["sent"], record["round"]) for record in records if record["phase"] == "round")
        sent = [(int(client), number) for sizes, number in rounds for one in sizes.values() for client in one]
        check_ledger(ledger_beside(run.private_store), run.read_config()["recorded"]["run_id"], sent)
    session.manifest = Manifest(checkpoint.note["manifest"])
    session.manifest.replay(record["sent"] for record in records)
    session.evaluation_manifest = Manifest(checkpoint.note["evaluation"])
    session.resume(checkpoint.round, checkpoint.server, records)
    return run.read_metrics()
