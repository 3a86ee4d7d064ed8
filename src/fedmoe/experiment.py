"""A run from beginning to end, on one screen: build, rounds, personalise, score, write. The caller pulls events."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedmoe import assembly, trees
from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.clients.privacy_ledger import ledger_beside
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.catalog import Connect, open_transport
from fedmoe.engines.delivery import save_delivery
from fedmoe.engines.session import Session
from fedmoe.engines.steps import STEPS, RoundRecord
from fedmoe.errors import RunError, Stopped
from fedmoe.evaluation.curve import curve_point
from fedmoe.evaluation.expert_warnings import WINDOW, choice_warnings, expert_warnings
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.stopping import reason_to_stop, validation_point
from fedmoe.models.network import ModuleOrFactory
from fedmoe.models.start_weights import write_weights
from fedmoe.privacy_report import read_ledger
from fedmoe.report.runs import read_run
from fedmoe.report.write import write_report
from fedmoe.result import Result, results_of
from fedmoe.resuming import (
    checkpoint_session,
    extend_run,
    newest_checkpoint,
    record_run,
    resume_session,
    scored_clients,
    steps_in,
)
from fedmoe.storage.checkpoints import Checkpoint
from fedmoe.storage.finished import changed_since_finished, mark_finished
from fedmoe.storage.results import read_results
from fedmoe.storage.reuse import adopt_rounds
from fedmoe.storage.rundir import RunDirectory


class Started(NamedTuple):
    """`resumed_from` is the round of the checkpoint, 0 for a fresh run; `notes` say what was odd or could be better.

    `rounds_of` is another algorithm whose rounds are the same, where this run begins with the end of those.
    """

    rounds: int
    resumed_from: int
    notes: list[str]
    finished: bool = False
    rounds_of: str | None = None


class Ended(NamedTuple):
    """The rounds end here, before their number is up."""

    round: int
    reason: str


class Advanced(NamedTuple):
    """Some of the clients are personalised or scored."""

    stage: str
    done: int
    total: int


Event = Started | RoundRecord | Ended | Advanced | Result


def never() -> bool:
    return False


def run_events(
    config: ExperimentConfig,
    directory: Path,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
    rounds_of: Path | None = None,
    command: str = "",
    should_stop: Callable[[], bool] = never,
    connect: Connect = open_transport,
) -> Iterator[Event]:
    """Run or resume `config` in `directory`. Every event is small; the last one is the Result.

    A run that is there with fewer rounds goes on.
    `rounds_of` is a finished run with the same rounds: a new run starts from where they ended. `connect` opens the
    transport: that of the config's engine, or of whoever calls from inside an engine.
    """
    run = RunDirectory(directory)
    with run.opened():
        config = _with_recorded_choices(config, run)
        parts = assembly.build(
            config,
            federation=federation,
            expert=expert,
            gate=gate,
            algorithm=algorithm,
            common_expert=common_expert,
        )
        parts.algorithm.init_server(config.seed)  # a config that is refused leaves nothing behind
        extended = extend_run(run, parts)
        run_id = record_run(run, parts)
        if parts.source.split is not None:
            parts.source.split.save(run.split)
        if parts.setup.common is not None:
            write_weights(run.common_expert, parts.setup.common.constants, parts.setup.common.notes)
        adopted, odd = _adopt(rounds_of, run, parts, run_id) if rounds_of else (None, [])
        started = Started(0, 0, [*parts.notes, *parts.fallback_notes(), *odd], rounds_of=adopted)
        yield from _Run(parts, run, run_id, command, should_stop, connect).events(started, extended=extended)


def _with_recorded_choices(config: ExperimentConfig, run: RunDirectory) -> ExperimentConfig:
    """A resume computes as the run began, whatever would be chosen now."""
    asked = config.engine
    if "auto" not in (asked.backend, asked.device) or not run.config.exists():
        return config
    chosen = {"device": "cpu", **run.read_config()["engine"]}
    free = {key: chosen[key] for key in ("backend", "device") if getattr(asked, key) == "auto"}
    return config.model_copy(update={"engine": asked.model_copy(update=free)})


def _adopt(rounds_of: Path, run: RunDirectory, parts: Parts, run_id: str) -> tuple[str | None, list[str]]:
    """Whose rounds were adopted, if any were, and what there is to say."""
    start, field = parts.algorithm.init_server(parts.config.seed), parts.algorithm.rounds_field

    def server_with(state: Tree) -> Tree:
        trained = trees.from_named(type(getattr(start, field) if field else start), trees.to_named(state))
        return start._replace(**{field: trained}) if field else trained

    source = RunDirectory(rounds_of)
    known, rounds = source.read_config(), read_results(rounds_of)["rounds"]
    adopted, notes = adopt_rounds(source, run, rounds, (known["recorded"]["run_id"], run_id), server_with)
    return (known["algorithm"]["name"] if adopted else None), notes


class _Run:
    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        run_id: str,
        command: str,
        should_stop: Callable[[], bool],
        connect: Connect,
    ) -> None:
        self.connect = connect
        self.parts, self.run, self.run_id, self.should_stop = parts, run, run_id, should_stop
        self.config, self.algorithm, self.federation = parts.config, parts.algorithm, parts.federation
        self.command = command
        self.history: list[dict[str, Any]] = []
        self.curve: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.stopped: Ended | None = None

    def events(self, started: Started, *, extended: bool) -> Iterator[Event]:
        begun = time.monotonic()
        with self.connect(self.parts, self.run.private_store, self.run_id) as transport:
            session = Session(self.parts, transport)
            checkpoint, odd = newest_checkpoint(self.run, self.run_id, session)
            finished, changed = self._finished(session, checkpoint)
            yield started._replace(
                rounds=session.num_steps,
                resumed_from=checkpoint.round if checkpoint else 0,
                notes=[*started.notes, *odd, *changed],
                finished=finished is not None,
            )
            if finished is not None:
                yield self._shown_again(session, checkpoint, finished)
                return
            events = resume_session(self.run, session, checkpoint)
            self._remember(events)
            if extended:
                session.forget_later_states()
            earlier = sum(record["seconds"] for record in self.history)
            yield from self._train(session)
            traffic = session.manifest.totals()
            session.deliver(self._scored_clients())
            yield from self._personalize(session)
            scores: list[Score] = []
            for batch in session.score():
                scores += batch
                yield Advanced("score", len({score.client for score in scores}), len(session.delivered))
        if self.config.evaluation.every and session.num_rounds:
            self._record_curve_point(session.num_rounds, scores, traffic)
        yield self._finish(session, sorted(scores, key=lambda score: score.place), earlier + time.monotonic() - begun)

    def _remember(self, events: Sequence[dict[str, Any]]) -> None:
        self.history = [event for event in events if event["event"] in STEPS]
        self.curve = [event for event in events if event["event"] == "curve"]
        self.validations = [event for event in events if event["event"] == "validation"]
        for event in events:
            if event["event"] == "stopped":
                self.stopped = Ended(event["round"], event["reason"])

    def _train(self, session: Session) -> Iterator[Event]:
        while not session.is_trained:
            self._stop_if_asked(f"after round {session.step} of {session.num_steps}")
            record = session.next_round()
            record = record._replace(warnings=self._warnings(record))
            self.history.append(self._record({"event": record.phase, **record._asdict()}))
            ended = self._end_if_good_enough(session, record)
            if self._is_evaluated_after(session):
                scores = session.evaluate(self._scored_clients())
                self._record_curve_point(session.step, scores, session.manifest.totals())
            self._checkpoint(session)
            yield record
            if ended:
                yield ended
            self._stop_if_hopeless()

    def _end_if_good_enough(self, session: Session, record: RoundRecord) -> Ended | None:
        """By validation scores; of an abandoned round there is nothing new to say, and the last ends by itself."""
        schedule = self.config.schedule
        is_last = session.step >= session.num_rounds
        if is_last or record.abandoned or not schedule.may_end_after(session.step):
            return None
        scores = session.validation_scores()
        if not scores:
            raise RunError(
                "schedule.stop_at and schedule.patience need validation examples, but no client that takes part sent "
                "scores on any. Give clients validation rows that are not opted out, or remove the two keys."
            )
        point = {"event": "validation", "round": session.step, **validation_point(scores)}
        self.validations.append(self._record(point))
        reason = reason_to_stop(self.validations, schedule.stop_at, schedule.patience)
        if reason is None:
            return None
        session.plan_rounds(ended_after=session.step)
        self.stopped = Ended(session.step, reason)
        self._record({"event": "stopped", **self.stopped._asdict()})
        return self.stopped

    def _checkpoint(self, session: Session) -> None:
        due = session.step % self.config.schedule.checkpoint_every == 0
        if not (due or session.step >= session.num_rounds or self.should_stop()):
            return
        checkpoint_session(self.run, self.run_id, session)

    def _warnings(self, record: RoundRecord) -> list[str]:
        warnings = [f"abandoned: {record.abandoned}"] if record.abandoned else []
        if record.experts:
            loads = [experts["load"] for event in self.history[-WINDOW:] if (experts := event["experts"])]
            warnings += expert_warnings([*loads, record.experts["load"]])
        if "first_choice" in record.experts:
            watched = [event["experts"] for event in self.history[-WINDOW:]] + [record.experts]
            warnings += choice_warnings([experts["first_choice"] for experts in watched if "first_choice" in experts])
        return warnings

    def _stop_if_hopeless(self) -> None:
        limit = self.config.schedule.max_abandoned_rounds
        latest = self.history[-limit:]
        if len(latest) == limit and all(record["abandoned"] for record in latest):
            raise RunError(
                f"the last {limit} rounds were abandoned, so nothing is learnt: {latest[-1]['abandoned']}. If the "
                "loss diverged, lower training.federated.learning_rate; if clients get lost, schedule.min_clients."
            )

    def _record(self, event: dict[str, Any]) -> dict[str, Any]:
        self.run.append_metrics([event])
        return event

    def _is_evaluated_after(self, session: Session) -> bool:
        """Not after the last round: what is scored then anyway is the end of the curve."""
        every = self.config.evaluation.every
        return bool(every) and session.step % (every or 1) == 0 and session.step < session.num_rounds

    def _record_curve_point(self, number: int, scores: Sequence[Score], traffic: dict[str, int]) -> None:
        """Of the learning curve: scores before personalisation."""
        shown = (score for score in scores if score.model == "before" and score.answer == self.algorithm.headline)
        before = sorted(shown, key=lambda score: score.place)
        self.curve.append(self._record({"event": "curve", "round": number, **curve_point(before, traffic)}))

    def _personalize(self, session: Session) -> Iterator[Event]:
        done = 0
        if self.algorithm.personalize:
            for clients in session.personalize():
                done += len(clients)
                yield Advanced("personalise", done, len(session.delivered))
                self._stop_if_asked(f"after personalising {done} of {len(session.delivered)} clients")

    def _scored_clients(self) -> list[ClientId]:
        return scored_clients(self.config, self.federation.num_clients, self.federation.num_unseen)

    def _finished(self, session: Session, checkpoint: Checkpoint | None) -> tuple[dict[str, Any] | None, list[str]]:
        """The results of a run that came to its end before, if they are as it left them, else why not."""
        trained = checkpoint.round == session.num_steps if checkpoint else session.num_steps == 0
        changed = changed_since_finished(self.run, self.run_id) if trained else None
        if changed:
            return None, [f"{' and '.join(changed)} changed after the run ended: clients are scored again."]
        return (None if changed is None else read_results(self.run.path)), []

    def _shown_again(self, session: Session, checkpoint: Checkpoint | None, results: dict[str, Any]) -> Result:
        """Nothing is written, and computed only what is missing of the clients' models, which can be asked for."""
        if checkpoint:
            session.resume(checkpoint.round, checkpoint.server, steps_in(self.run, checkpoint))
        session.deliver(self._scored_clients())
        if self.algorithm.personalize:
            list(session.personalize())
        return Result(results, self.run.path, session)

    def _finish(self, session: Session, scores: Sequence[Score], seconds: float) -> Result:
        self.run.append_metrics([self._score_event(score) for score in scores])
        facts = {"run_id": self.run_id, "command": self.command, "seconds": seconds, "rounds": session.num_rounds}
        facts |= {"validations": _without_event(self.validations), "stopped": self.stopped and self.stopped._asdict()}
        ledger = ledger_beside(self.run.private_store)
        if self.parts.privacy and ledger.exists():  # on silos each has its own
            facts["privacy"] = read_ledger(ledger, self.run_id).as_table()
        data = results_of(self.parts, session, self.history, self.curve, scores, facts)
        self.run.write_json(self.run.manifest, data.pop("manifest"))
        self.run.write_json(self.run.results, data)
        if len(self.algorithm.delivery) > 1:
            save_delivery(self.run.delivery, session.delivery_record)
        write_report([read_run(self.run.path)], self.run.path, data["name"])
        mark_finished(self.run, self.run_id)
        return Result(data, self.run.path, session)

    def _score_event(self, score: Score) -> dict[str, Any]:
        names = self.federation.names
        return {"event": "score", **score.as_dict(), **({"name": names[score.client]} if names else {})}

    def _stop_if_asked(self, where: str) -> None:
        if self.should_stop():
            raise Stopped(f"stopped {where}. Run the same command again to resume.")


def _without_event(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: point[key] for key in point if key != "event"} for point in points]
