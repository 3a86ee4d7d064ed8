"""One validated TOML file describes a run. Unknown keys are refused, and the nearest known one is named."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from fedmoe.aggregation.server_optimizer import ServerOptimizer
from fedmoe.algorithm_choice import AlgorithmChoice
from fedmoe.algorithms.catalog import CATALOG, find
from fedmoe.algorithms.outside import entry_of
from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.config_errors import explain, require_finite
from fedmoe.config_sections import (
    EngineConfig,
    EvaluationConfig,
    OptOutConfig,
    ScheduleConfig,
    Section,
    TrainingConfig,
)
from fedmoe.data_choice import DataChoice, DataConfig
from fedmoe.errors import ConfigError
from fedmoe.evaluation.stopping import require_targets
from fedmoe.import_strings import is_import_string, name_of
from fedmoe.models.settings import CommonExpertConfig, MlpModel, ModelConfig
from fedmoe.partition.settings import MajoritySplit, SplitConfig
from fedmoe.paths import expanded
from fedmoe.privacy_choice import PrivacyConfig
from fedmoe.setting_types import NonNegativeInt

# In a file they are relative to that file.
PATHS = (
    ("data", "folder"), ("data", "file"), ("opt_out", "masks"), ("model", "start_from"), ("common_expert", "weights"),
)  # fmt: skip
RECORDED = "recorded"  # the table that a run adds to its own config.toml: facts, no settings


class ExperimentConfig(Section):
    name: str = "run"
    seed: NonNegativeInt = 0
    data: DataChoice = DataConfig()
    split: SplitConfig = MajoritySplit()
    opt_out: OptOutConfig = OptOutConfig()
    model: ModelConfig = MlpModel()
    gate: ModelConfig | None = None  # default: the same kind as `model`
    common_expert: CommonExpertConfig | None = None  # a frozen network that every client has (Dun et al. 2023)
    algorithm: AlgorithmChoice = AlgorithmChoice()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    privacy: PrivacyConfig | None = None  # what clients send is trained with differential privacy
    compare: tuple[str | AlgorithmChoice, ...] = ("fedavg", "local_only", "fine_tuned", "specialist_mixture")

    @field_validator("name")
    @classmethod
    def _is_a_place_below_runs(cls, name: str) -> str:
        parts = name.split("/")
        if any(not re.fullmatch(r"[\w.=+ -]+", part) or set(part) <= {".", " "} for part in parts):
            raise ConfigError(
                f"name={name!r} cannot name a folder below runs/. Use letters, digits and . _ - = + (and / between "
                "parts); elsewhere a run lives with --dir."
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _one_server_optimizer_for_all(cls, table: Any) -> Any:
        """An algorithm's own setting comes first; one that has no such setting is left alone."""
        if not isinstance(table, Mapping) or not isinstance(schedule := table.get("schedule"), Mapping):
            return table
        optimizer = schedule.get("server_optimizer")
        compared = table.get("compare", cls.model_fields["compare"].default)
        if not (_is_server_optimizer(optimizer) and isinstance(compared, list | tuple)):
            return table  # nothing to apply, or a mistake that is found under its own key
        return {
            **table,
            "algorithm": _with_server_optimizer(table.get("algorithm", {}), optimizer),
            "compare": [one if one == _name(table) else _with_server_optimizer(one, optimizer) for one in compared],
        }

    @model_validator(mode="after")
    def _sections_fit_together(self) -> "ExperimentConfig":
        folders = [choice.folder for choice in self.choices()]
        for name in folders:
            if folders.count(name) > 1:
                raise ConfigError(f"compare has {name!r} more than once. Give each a label of its own: label = '...'.")
        if self.data.has_own_clients and "split" in self.model_fields_set:
            raise ConfigError(
                f"data.name={self.data.name!r} says who holds what, so there is nothing to split. Remove the section "
                "[split]."
            )
        require_targets(self.schedule.stop_at or {}, self.evaluation.metrics)
        if self.schedule.may_end_after(0) and self.evaluation.clients_asked == "none":
            raise ConfigError(
                "schedule.stop_at and schedule.patience need validation scores of clients, but "
                "evaluation.clients_asked is 'none'. Remove them, or ask 'opted_in' or 'all' clients."
            )
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_used(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table: dict[str, Any] = write(self)
        if self.data.has_own_clients:
            table.pop("split", None)
        return table

    def choices(self) -> list[AlgorithmChoice]:
        """What `fedmoe compare` trains, one after the other. The one that [algorithm] names has the settings there."""
        named = self.algorithm.model_copy(update={"label": None})
        return [
            named if one == named.name else AlgorithmChoice(name=one) if isinstance(one, str) else one
            for one in self.compare
        ]


def _name(table: Mapping[str, Any]) -> Any:
    """Of the section [algorithm], which may be anything yet."""
    section = table.get("algorithm", {})
    return section.get("name") if isinstance(section, Mapping) else None


def _is_server_optimizer(value: Any) -> bool:
    try:
        TypeAdapter(ServerOptimizer).validate_python(value)
    except ValidationError:
        return False
    return True


def _with_server_optimizer(choice: Any, optimizer: Any) -> Any:
    if isinstance(choice, AlgorithmChoice):
        choice = choice.model_dump(exclude_unset=True)
    table = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(table, Mapping) or "server_optimizer" in table:
        return choice
    name = table.get("name", AlgorithmChoice.model_fields["name"].default)
    entry = find(name) if name in CATALOG or is_import_string(name) else None
    has_one = entry is not None and "server_optimizer" in entry.config.__dataclass_fields__
    return {**table, "server_optimizer": optimizer} if has_one else choice


def with_algorithm(config: ExperimentConfig, factory: AlgorithmFactory, settings: Any = None) -> ExperimentConfig:
    """The same with a factory that is passed as such; `settings` are the section [algorithm], its own name left out."""
    given = config.algorithm.model_dump(include=config.algorithm.model_fields_set) if settings is None else settings
    if not isinstance(given, Mapping):
        raise ConfigError(f"algorithm={given!r} is no table of settings, such as {{'label': 'mine'}}.")
    name = name_of(factory)
    if given.get("name", name) != name:
        raise ConfigError(
            f"algorithm= is given ({name}), but the config names another: algorithm.name={given['name']!r}. "
            "Remove one of the two; the other keys of [algorithm] are settings of the one that is left."
        )
    entry = entry_of(factory)
    if config.schedule.server_optimizer is not None and "server_optimizer" in entry.config.__dataclass_fields__:
        given = {"server_optimizer": config.schedule.server_optimizer, **given}
    choice = AlgorithmChoice.model_validate({**given, "name": name}, context=entry)
    return config.model_copy(update={"algorithm": choice})


def read_config(path: Path, changes: Sequence[str] = (), algorithm: AlgorithmFactory | None = None) -> ExperimentConfig:
    """Read a TOML file and apply `key.sub=value` changes, whose values are TOML too (or plain text).

    Paths in the file are relative to the file, paths in a change to the current folder. For `algorithm` see
    `with_algorithm`.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}. Name an existing TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not valid TOML: {error}.") from error
    for section, key in PATHS:
        inner = table.get(section)
        if (
            isinstance(inner, dict)
            and isinstance(inner.get(key), str)
            and (key != "file" or inner.get("name") == "table")
        ):
            inner[key] = str(path.parent / expanded(inner[key]))
    for change in changes:
        _apply(table, change)
    return parse_config(table, algorithm)


def parse_config(table: Mapping[str, Any], algorithm: AlgorithmFactory | None = None) -> ExperimentConfig:
    """A config from what a TOML file holds. The table [recorded] of a run's own config.toml is not read.

    Where a factory is passed, the section [algorithm] holds its settings (`with_algorithm`).
    """
    if algorithm is not None:
        rest = {key: value for key, value in table.items() if key != "algorithm"}
        return with_algorithm(parse_config(rest), algorithm, table.get("algorithm", {}))
    table = {key: value for key, value in table.items() if not (key == RECORDED and isinstance(value, Mapping))}
    for section, default in (("split", {"kind": "majority"}), ("model", {"name": "mlp"}), ("gate", {"name": "mlp"})):
        if isinstance(given := table.get(section), Mapping):
            table = {**table, section: {**default, **given}}
    require_finite(table)
    try:
        return ExperimentConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, ExperimentConfig)) from error


def _apply(table: dict[str, Any], change: str) -> None:
    key, separator, text = change.partition("=")
    if not separator:
        raise ConfigError(f"--set {change!r} has no '='. Write it as key=value, for example --set schedule.rounds=100.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {change!r}: {parent!r} is a value, not a section.")
    table[last] = value
