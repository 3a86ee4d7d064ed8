"""The Python interface: one call from a config, or from the user's own data and modules."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fedmoe import assembly
from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.comparison import Comparison, Failed, compare_events, finished, members
from fedmoe.config import ExperimentConfig, parse_config, read_config, with_algorithm
from fedmoe.errors import ConfigError, RunError
from fedmoe.experiment import Event, run_events
from fedmoe.models.network import ModuleOrFactory
from fedmoe.paths import expanded
from fedmoe.report.runs import read_run
from fedmoe.report.write import write_report
from fedmoe.result import Result

ConfigLike = ExperimentConfig | Mapping[str, Any] | str | Path


def run(
    config: ConfigLike,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
    directory: str | Path | None = None,
    progress: bool = False,
    callback: Callable[[Event], object] | None = None,
) -> Result:
    """Train, personalise and score; resumes a run that `directory` holds unfinished. Leaves a report there.

    Args:
        config: a path to a TOML file, its content as a dict, or a parsed config.
        federation: the user's own clients (`federation_from_clients`); the config's data and split are then not read.
        expert: a module, or a factory of modules (a class, a lambda), that maps x to one score per class.
        gate: likewise, with a single output; default: the config's model with one output.
        algorithm: a factory of the user's own, factory(setup) or factory(config: MyConfig, setup); its settings, the
            fields of MyConfig, are what the config has in [algorithm]. See docs/own_algorithm.md.
        common_expert: a trained module that every client has and nobody trains further, instead of a file of weights.
        directory: where the run lives; default: a new temporary folder.
        progress: show a bar, in a terminal or a notebook.
        callback: called with every event: `Started`, a `RoundRecord` for each round, `Advanced` while clients
            personalise and are scored, and the `Result`. What it raises ends the run, which can be resumed.
    """
    parsed = _parsed(config, federation, expert, gate, algorithm)
    home = _home(directory)
    own = {"federation": federation, "expert": expert, "gate": gate, "common_expert": common_expert}
    events = run_events(parsed, home, **own)  # type: ignore[arg-type]
    with _watching(progress) as show:
        for event in events:
            show(parsed.algorithm.name, event)
            if callback:
                callback(event)
    assert isinstance(event, Result)
    return event


def compare(
    config: ConfigLike,
    *,
    seeds: Sequence[int] | None = None,
    algorithms: Sequence[str | Mapping[str, Any]] | None = None,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    directory: str | Path | None = None,
    progress: bool = False,
    callback: Callable[[str, Event], object] | None = None,
) -> Comparison:
    """Train several algorithms on one split and the same seeds: one table, with intervals over seeds.

    Args:
        seeds: default: the seed of the config. A federation that is passed stays the same for all of them.
        algorithms: names, or tables with a name and settings; default: `compare` of the config.
        callback: called with the label of a run (`fedavg-seed0`) and its event.
        config, federation, expert, gate, directory, progress: as for `run`; a comparison that was stopped resumes.

    A run that fails does not stop the others: what failed is raised when they are finished.
    """
    parsed = _parsed(config, federation, expert, gate, None)
    if algorithms is not None:
        if not algorithms:
            raise ConfigError(
                "algorithms= is empty, so there is nothing to compare. Name some: ['fedavg', 'fine_tuned']."
            )
        table = parsed.model_dump(mode="json", exclude_unset=True)
        parsed = parse_config({**table, "compare": list(algorithms)})
    home, numbers = _home(directory), list(seeds) if seeds is not None else [parsed.seed]
    events = compare_events(parsed, home, numbers, federation=federation, expert=expert, gate=gate)
    failed = {}
    with _watching(progress) as show:
        for member, event in events:
            if isinstance(event, Failed):
                failed[member.label] = f"{member.label}: {event.error}"
                continue
            show(member.label, event)
            if callback:
                callback(member.label, event)
    compared = finished([one for one in members(parsed, home, numbers) if one.label not in failed], home)
    problems = list(failed.values())
    if compared.runs:
        write_report([read_run(folder) for folder in compared.runs.values()], home, parsed.name, problems)
        problems += [f"The other runs are finished: {home}."] * bool(failed)
    if failed:
        raise RunError(" ".join(problems))
    return compared


def build(
    config: ConfigLike,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
) -> Parts:
    """Everything that a run needs, built once; the arguments are those of `run`."""
    parsed = _parsed(config, federation, expert, gate, algorithm)
    return assembly.build(parsed, federation=federation, expert=expert, gate=gate, common_expert=common_expert)


def _home(directory: str | Path | None) -> Path:
    return expanded(directory) if directory else Path(tempfile.mkdtemp(prefix="fedmoe-"))


@contextmanager
def _watching(progress: bool) -> Iterator[Callable[[str, Event], None]]:
    if not progress:
        yield lambda _label, _event: None
        return
    from rich.console import Console  # here, because most runs from Python show nothing

    from fedmoe.display.progress import RunProgress

    with RunProgress(Console()) as shown:
        yield shown.show


def _parsed(
    config: ConfigLike,
    federation: Federation | None,
    expert: ModuleOrFactory | None,
    gate: ModuleOrFactory | None,
    algorithm: AlgorithmFactory | None,
) -> ExperimentConfig:
    if federation is not None and not isinstance(federation, Federation):
        raise ConfigError(
            f"federation= is a {type(federation).__name__}. Make a federation of your data first: "
            "fedmoe.federation_from_clients({name: (x, y), ...}), or federation_from_table."
        )
    if isinstance(config, str | Path):
        config = read_config(expanded(config), algorithm=algorithm)
    elif not isinstance(config, ExperimentConfig):
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config= is {'None' if config is None else f'a {type(config).__name__}'}. Give the path of a TOML "
                "file, its content as a dict ({} for the defaults), or a parsed config."
            )
        config = parse_config(config, algorithm)
    elif algorithm is not None:
        config = with_algorithm(config, algorithm)
    own_module = "expert" if expert is not None else "gate" if gate is not None else None
    if own_module and federation is None and "data" not in config.model_fields_set:
        raise ConfigError(
            f"{own_module}= is given, but neither federation= nor a section [data], so it would be trained on "
            f"{config.data.name!r}. Pass your clients as federation=, or name the data: data.name = '...'."
        )
    return config
