"""Several algorithms on one split and the same seeds. Algorithms with the same rounds train them once."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedmoe.algorithms.catalog import find
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.errors import ConfigError, RunError, Stopped
from fedmoe.evaluation.summary import Row, RunRecord, summarise
from fedmoe.experiment import Event, never, run_events
from fedmoe.models.network import ModuleOrFactory
from fedmoe.report.page import scores_section
from fedmoe.report.text import summary_text
from fedmoe.result import Result
from fedmoe.storage.results import read_results

# What the rounds of a run do not depend on; nor does it make a finished run another one, but for the last two.
NOT_IN_ROUNDS = ("name", "compare", "engine")
AFTER_ROUNDS = ("local", "personal")


@dataclass(frozen=True)
class Comparison:
    """What `fedmoe.compare` ends with: `results` are those of every run, as results.json holds them."""

    results: list[RunRecord]
    directory: Path
    runs: dict[str, Path]  # the folder of each run, for `fedmoe.load`

    @property
    def rows(self) -> list[Row]:
        """The table: one row per method, its means over clients and seeds."""
        return summarise(self.results)

    def summary(self) -> str:
        return f"{summary_text(self.results)}\n\n{self.directory}"

    def __repr__(self) -> str:
        methods = ", ".join(row["title"] for row in self.rows)
        return f"<Comparison of {methods}; seeds {sorted({run['seed'] for run in self.results})}; in {self.directory}>"

    def _repr_html_(self) -> str:
        return scores_section(self.results)


class Member(NamedTuple):
    """One run of a comparison."""

    label: str
    config: ExperimentConfig
    directory: Path


class Failed(NamedTuple):
    """In place of a run's further events: it cannot go on. The runs after it are made all the same."""

    error: RunError


def home_of(config: ExperimentConfig) -> str:
    """Below runs/; not the name itself, which is the home of one run with this config."""
    return f"{config.name}-comparison"


def members(config: ExperimentConfig, directory: Path, seeds: Sequence[int]) -> list[Member]:
    _require_seeds(seeds)
    runs = []
    for seed in seeds:
        for choice in config.choices():
            label = f"{choice.folder}-seed{seed}"
            changes = {"seed": seed, "algorithm": choice, "name": f"{home_of(config)}/{label}"}
            runs.append(Member(label, config.model_copy(update=changes), directory / label))
    return runs


def compare_events(
    config: ExperimentConfig,
    directory: Path,
    seeds: Sequence[int],
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    command: str = "",
    should_stop: Callable[[], bool] = never,
) -> Iterator[tuple[Member, Event | Failed]]:
    """Run after run, event after event; a comparison that was stopped resumes."""
    trained: dict[str, Path] = {}
    for member in members(config, directory, seeds):
        key = rounds_key(member.config)
        try:
            for event in run_events(
                member.config,
                member.directory,
                federation=federation,
                expert=expert,
                gate=gate,
                rounds_of=trained.get(key) if key else None,
                command=command,
                should_stop=should_stop,
            ):
                yield member, event
                if isinstance(event, Result) and key is not None:
                    trained.setdefault(key, member.directory)
        except Stopped:
            raise
        except RunError as error:
            yield member, Failed(error)


def finished(runs: Iterable[Member], directory: Path) -> Comparison:
    """Of runs that are all there."""
    folders = {member.label: member.directory for member in runs}
    return Comparison([read_results(folder) for folder in folders.values()], directory, folders)


def _require_seeds(seeds: Sequence[int]) -> None:
    """A seed that counts twice would make an interval of nothing."""
    for seed in seeds:
        if seed < 0:
            raise ConfigError(f"seed {seed} is negative. Seeds are whole numbers from 0.")
        if seeds.count(seed) > 1:
            raise ConfigError(f"seed {seed} is there twice, which would count one run as two. Name each seed once.")


def rounds_key(config: ExperimentConfig) -> str | None:
    """Runs with equal keys have the same rounds: one trains them, the others start where they ended.

    None for an algorithm whose rounds are its own.
    """
    rounds = config.algorithm.entry.rounds
    if rounds is None:
        return None
    options = config.algorithm.options()
    shared = {name: repr(getattr(options, name)) for name in find(rounds).config.__dataclass_fields__}
    table = config.model_dump(mode="json", exclude={*NOT_IN_ROUNDS, "algorithm"})
    table["training"] = {stage: value for stage, value in table["training"].items() if stage not in AFTER_ROUNDS}
    return json.dumps([rounds, shared, table], sort_keys=True)
