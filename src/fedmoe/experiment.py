"""A run from beginning to end, on one screen: build, rounds, personalise, score, write. The caller pulls events."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmoe import assembly
from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.clients.federation import Federation
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.embedded import default_workers, start
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Coordinator, RoundRecord
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError
from fedmoe.evaluation.curve import curve_point
from fedmoe.evaluation.expert_warnings import WINDOW, expert_warnings
from fedmoe.evaluation.metrics import Score
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.result import Result, results_of, versions
from fedmoe.storage.checkpoints import Checkpoint, load_newest, oldest_round, save_checkpoint
from fedmoe.storage.reuse import adopt_rounds
from fedmoe.storage.rundir import RunDirectory
from fedmoe.streams import numpy_stream
from fedmoe.training.backends import cohort_size, missing_kernels


class Started(NamedTuple):
    """`resumed_from` is the round of the checkpoint, 0 for a fresh run; `notes` say what was odd on the way."""

    rounds: int
    resumed_from: int
    notes: list[str]


class Advanced(NamedTuple):
    """Some of the clients are personalised or scored."""

    stage: str
    done: int
    total: int


class Stopped(RunError):  # noqa: N818 (it is no error that a user stops a run)
    """The user asked the run to stop; it can be resumed."""


Event = Started | RoundRecord | Advanced | Result


def never() -> bool:
    return False


def run_events(
    config: ExperimentConfig,
    directory: Path,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    command: str = "",
    should_stop: Callable[[], bool] = never,
    rounds_of: Path | None = None,
) -> Iterator[Event]:
    """Run or resume `config` in `directory`. Every event is small; the last one is the Result."""
    run = RunDirectory(directory)
    with run.opened():
        built = assembly.Built(federation) if federation is not None else assembly.build_federation(config)
        federation = built.federation
        if config.evaluation.pooled:
            federation = with_pooled_client(federation, config.evaluation.pooled, config.seed)
        networks = assembly.build_networks(config.model, federation, expert, gate)
        # Tried before the config is recorded: a config that is refused leaves nothing behind.
        tried = assembly.build_algorithm(config, federation, networks, assembly.resolve_backend(config, networks))
        tried.init_server(config.seed)
        asked = config
        config, run_id = _record(config, networks, run, federation.digest)
        if built.split is not None:
            built.split.save(run.split)
        backend = assembly.resolve_backend(config, networks)
        algorithm = assembly.build_algorithm(config, federation, networks, backend)
        missing = missing_kernels(networks, backend) if asked.engine.backend == "auto" else None
        nothing = config.schedule.release and not algorithm.release
        said = [missing, f"{config.algorithm.name} has nothing to release" if nothing else None]
        notes = [note for note in said if note]
        if rounds_of is not None:
            source = RunDirectory(rounds_of)
            run_ids = (source.read_config()["recorded"]["run_id"], run_id)
            notes += adopt_rounds(source, run, algorithm.server_type, run_ids)
        sizes = cohort_size(networks, backend)
        yield from _Run(config, run, run_id, federation, algorithm, sizes, should_stop).events(
            {**_shown(built), "backend": backend, "command": command, "model_weights": networks[0].num_weights},
            notes,
        )


class _Run:
    def __init__(
        self,
        config: ExperimentConfig,
        run: RunDirectory,
        run_id: str,
        federation: Federation,
        algorithm: Algorithm,
        cohort_size: Callable[[int], int],
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.run, self.federation, self.algorithm = config, run, federation, algorithm
        self.cohort_size, self.run_id = cohort_size, run_id
        self.should_stop = should_stop
        self.rounds = config.schedule.rounds if algorithm.round else 0
        self.releases = config.schedule.release and algorithm.release is not None

    def events(self, facts: dict[str, Any], notes: list[str]) -> Iterator[Event]:
        begun = time.monotonic()
        checkpoint, odd = load_newest(
            self.run.checkpoints,
            self.algorithm.server_type,
            self.run_id,
            lambda found: self.run.check_metrics(*found.note["metrics"]),
        )
        if checkpoint is None:
            checkpoint = Checkpoint(0, self.algorithm.init_server(self.config.seed), {})
        done, server, note = checkpoint
        self.run.truncate_metrics(note["metrics"][0] if note else 0)
        known = self.run.read_metrics()
        history = [{"experts": {}, "warnings": [], **event} for event in known if event["event"] == "round"]
        curve = [event for event in known if event["event"] == "curve"]
        earlier = sum(event["seconds"] for event in history)
        manifest = Manifest(note.get("manifest"))
        manifest.replay(event["sent"] for event in history)
        yield Started(self.rounds, done, [*notes, *odd])
        worker = Worker(self.algorithm, self.federation, self.run.private_store, self.config.seed, self.run_id)
        with start(worker, self.config.engine.workers or default_workers()) as transport:
            coordinator = self._coordinator(transport, manifest)
            observer = self._coordinator(transport, Manifest())  # what only serves a look is no traffic
            for number in range(done + 1, self.rounds + 1):
                self._stop_if_asked(f"after round {number - 1} of {self.rounds}")
                server, record = coordinator.run_round(server, number)
                record = record._replace(warnings=_warnings(history, record))
                history.append(self._record({"event": "round", **record._asdict()}))
                if self._is_looked_at(number):
                    curve.append(self._record(self._look(observer, server, number, manifest)))
                self._checkpoint(coordinator, server, record)
                yield record
            traffic = manifest.totals()
            server = coordinator.collect_release(server) if self.releases else server
            kept = coordinator.deliver(server, self._scored_clients())
            yield from self._personalize(coordinator, kept)
            scores: list[Score] = []
            for batch in coordinator.score(kept):
                scores += batch
                yield Advanced("score", len({score.client for score in scores}), len(kept))
            clock = coordinator.final_clock
        if self.config.evaluation.every and self.rounds:
            curve.append(self._record(_point(self.rounds, scores, traffic)))
        seconds = earlier + time.monotonic() - begun
        facts = facts | {"curve": [{key: point[key] for key in point if key != "event"} for point in curve]}
        yield self._finish(facts, history, manifest, sorted(scores), kept, clock, seconds)

    def _coordinator(self, transport: Any, manifest: Manifest) -> Coordinator:
        return Coordinator(
            self.algorithm,
            self.federation,
            transport,
            seed=self.config.seed,
            rounds=self.rounds,
            cohort_size=self.config.engine.cohort_size or self.cohort_size,
            manifest=manifest,
            max_update_norm=self.config.schedule.max_update_norm,
        )

    def _record(self, event: dict[str, Any]) -> dict[str, Any]:
        self.run.append_metrics([event])
        return event

    def _is_looked_at(self, number: int) -> bool:
        """Not after the last round: what is scored then anyway is the end of the curve."""
        every = self.config.evaluation.every
        return bool(every) and number % (every or 1) == 0 and number < self.rounds

    def _look(self, observer: Coordinator, server: Tree, number: int, manifest: Manifest) -> dict[str, Any]:
        """A point of the learning curve: what clients would answer if the rounds ended here."""
        server = observer.collect_release(server, number) if self.releases else server
        kept = observer.deliver(server, self._scored_clients(), number)
        scores = [score for batch in observer.score(kept, number) for score in batch]
        return _point(number, scores, manifest.totals())

    def _checkpoint(self, coordinator: Coordinator, server: Tree, record: RoundRecord) -> None:
        due = record.round % self.config.schedule.checkpoint_every == 0
        if not (due or record.round == self.rounds or self.should_stop()):
            return
        note = {"manifest": coordinator.manifest.for_checkpoint(), "metrics": self.run.metrics_state()}
        save_checkpoint(self.run.checkpoints, Checkpoint(record.round, server, note), self.run_id)
        if self.algorithm.client_type is not Nothing or self.algorithm.init_personal:
            coordinator.forget_superseded(oldest_round(self.run.checkpoints))

    def _personalize(self, coordinator: Coordinator, kept: dict[ClientId, Tree]) -> Iterator[Event]:
        done = 0
        if self.algorithm.personalize:
            for clients in coordinator.personalize(kept):
                done += len(clients)
                yield Advanced("personalise", done, len(kept))
                self._stop_if_asked(f"after personalising {done} of {len(kept)} clients")

    def _scored_clients(self) -> list[ClientId]:
        """Everyone, or a seeded draw of the training clients; new_clients always."""
        everyone: Sequence[ClientId] = range(self.federation.num_clients)
        wanted = self.config.evaluation.clients
        if wanted is not None and wanted < len(everyone):
            rng = numpy_stream(self.config.seed, "evaluated clients")
            everyone = sorted(rng.choice(len(everyone), wanted, replace=False, shuffle=False).tolist())
        unseen = range(self.federation.num_clients, self.federation.num_clients + self.federation.num_unseen)
        return [*everyone, *unseen]

    def _finish(
        self,
        facts: dict[str, Any],
        history: list[dict[str, Any]],
        manifest: Manifest,
        scores: Sequence[Score],
        kept: dict[ClientId, Tree],
        clock: int,
        seconds: float,
    ) -> Result:
        takes_part = np.zeros(self.federation.num_clients, dtype=bool)
        takes_part[self.federation.participants] = True
        silent = np.flatnonzero(~takes_part)
        self.run.append_metrics([{"event": "score", **score._asdict()} for score in scores])
        self.run.write_json(self.run.manifest, manifest.as_dict(silent))
        traffic = manifest.totals() | {"opted_out_clients": len(silent)}
        timing = {"seconds": seconds, "rounds": self.rounds}
        data = {**results_of(self.config, history, scores), **timing, "traffic": traffic, **facts}
        self.run.write_json(self.run.results, data)
        return Result(data, self.run.path, self.algorithm, self.federation, kept, clock)

    def _stop_if_asked(self, where: str) -> None:
        if self.should_stop():
            raise Stopped(f"stopped {where}. Run the same command again to resume.")


def _point(number: int, scores: Sequence[Score], traffic: dict[str, int]) -> dict[str, Any]:
    """Of the learning curve: scores before personalisation."""
    before = sorted(score for score in scores if score.model == "before")
    return {"event": "curve", "round": number, **curve_point(before, traffic)}


def _warnings(history: Sequence[dict[str, Any]], record: RoundRecord) -> list[str]:
    loads = [experts["load"] for event in history[-WINDOW:] if (experts := event["experts"])]
    return expert_warnings([*loads, record.experts["load"]]) if record.experts else []


def _shown(built: assembly.Built) -> dict[str, Any]:
    """What a report shows of the split."""
    counts = [] if built.class_counts is None else built.class_counts[:200].tolist()
    return {"split_digest": built.federation.digest, "class_counts": counts, "class_names": list(built.class_names)}


def _record(
    config: ExperimentConfig, networks: tuple[Network, Network], run: RunDirectory, split_digest: str
) -> tuple[ExperimentConfig, str]:
    """Record the config with the way of training that was chosen; a resume uses the recorded way."""
    backend = assembly.resolve_backend(config, networks)
    resolved = config.model_copy(update={"engine": config.engine.model_copy(update={"backend": backend})})
    table = resolved.model_dump(mode="json")
    record = {"recorded": {"split_digest": split_digest, "versions": versions()}}
    if config.engine.backend == "auto" and not run.config.exists():
        return resolved, run.record_config({**table, **record})["recorded"]["run_id"]
    asked = {**table, "engine": {**table["engine"], "backend": config.engine.backend}, **record}
    recorded = run.record_config(asked)
    engine = config.engine.model_copy(update={"backend": recorded["engine"]["backend"]})
    return config.model_copy(update={"engine": engine}), recorded["recorded"]["run_id"]
