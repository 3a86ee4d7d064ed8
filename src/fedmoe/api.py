"""The Python interface: one call from a config, or from the user's own data and modules."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmoe import assembly
from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig, parse_config, read_config, with_algorithm
from fedmoe.errors import ConfigError
from fedmoe.experiment import run_events
from fedmoe.models.network import ModuleOrFactory
from fedmoe.paths import expanded
from fedmoe.result import Result

ConfigLike = ExperimentConfig | Mapping[str, Any] | str | Path


def run(
    config: ConfigLike,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    directory: str | Path | None = None,
) -> Result:
    """Train, personalise and score; resumes a run that `directory` holds unfinished. Leaves a report there.

    Args:
        config: a path to a TOML file, its content as a dict, or a parsed config.
        federation: the user's own clients (`federation_from_clients`); the config's data and split are then not read.
        expert: a module, or a factory of modules (a class, a lambda), that maps x to one score per class.
        gate: likewise, with a single output; default: the config's model with one output.
        algorithm: a factory of the user's own, factory(setup) or factory(config: MyConfig, setup); its settings, the
            fields of MyConfig, are what the config has in [algorithm]. See docs/own_algorithm.md.
        directory: where the run lives; default: a new temporary folder.
    """
    parsed = _parsed(config, federation, expert, gate, algorithm)
    home = expanded(directory) if directory else Path(tempfile.mkdtemp(prefix="fedmoe-"))
    *_, last = run_events(parsed, home, federation=federation, expert=expert, gate=gate)
    assert isinstance(last, Result)
    return last


def build(
    config: ConfigLike,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
) -> Parts:
    """Everything that a run needs, built once; the arguments are those of `run`."""
    parsed = _parsed(config, federation, expert, gate, algorithm)
    return assembly.build(parsed, federation=federation, expert=expert, gate=gate)


def _parsed(
    config: ConfigLike,
    federation: Federation | None,
    expert: ModuleOrFactory | None,
    gate: ModuleOrFactory | None,
    algorithm: AlgorithmFactory | None,
) -> ExperimentConfig:
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
