"""Several algorithms on one split and the same seeds. Algorithms with the same rounds train them once."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe.algorithm_choice import AlgorithmChoice
from fedmoe.algorithms.catalog import find
from fedmoe.config import ExperimentConfig
from fedmoe.errors import ConfigError
from fedmoe.experiment import Event, never, run_events
from fedmoe.result import Result


class Member(NamedTuple):
    """One run of a comparison."""

    label: str
    config: ExperimentConfig
    directory: Path


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
    command: str = "",
    should_stop: Callable[[], bool] = never,
) -> Iterator[tuple[Member, Event]]:
    """Run after run, event after event; a comparison that was stopped resumes."""
    trained: dict[tuple[Any, ...], Path] = {}
    for member in members(config, directory, seeds):
        key = _rounds_key(member.config.algorithm, member.config.seed)
        for event in run_events(
            member.config,
            member.directory,
            rounds_of=trained.get(key) if key else None,
            command=command,
            should_stop=should_stop,
        ):
            yield member, event
            if isinstance(event, Result) and key is not None:
                trained.setdefault(key, member.directory)


def _require_seeds(seeds: Sequence[int]) -> None:
    """A seed that counts twice would make an interval of nothing."""
    for seed in seeds:
        if seed < 0:
            raise ConfigError(f"seed {seed} is negative. Seeds are whole numbers from 0.")
        if seeds.count(seed) > 1:
            raise ConfigError(f"seed {seed} is there twice, which would count one run as two. Name each seed once.")


def _rounds_key(choice: AlgorithmChoice, seed: int) -> tuple[Any, ...] | None:
    """Of what the rounds depend on: the settings that the algorithm shares with the one whose rounds it has."""
    rounds = choice.entry.rounds
    if rounds is None:
        return None
    options = choice.options()
    return rounds, seed, *(repr(getattr(options, name)) for name in find(rounds).config.__dataclass_fields__)
