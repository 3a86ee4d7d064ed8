"""One validated TOML file describes a run. Unknown keys are refused, and the nearest known one is named."""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from fedmoe.algorithms.catalog import CATALOG, find
from fedmoe.errors import ConfigError
from fedmoe.models.settings import MlpModel, ModelConfig
from fedmoe.partition.settings import MajoritySplit, SplitConfig
from fedmoe.training.settings import LocalTraining

Fraction = Annotated[float, Field(ge=0, le=1)]
CHOICES = {"split": "kind", "model": "name"}  # sections of several kinds, and the key that says which


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    name: str = "digits"
    folder: Path | None = None  # default: the environment variable FEDMOE_DATA
    vocabulary_size: PositiveInt = 20_000  # of word-level text: ids that a model knows, made from opted-in text only


class Rule(Section):
    """Records whose `field` ("label" or a column of the data set) has one of these values are opted out."""

    field: str
    values: tuple[int, ...]


class OptOutConfig(Section):
    client_fraction: Fraction = 0.0
    clients: tuple[int, ...] = ()
    record_fraction: Fraction = 0.0
    rules: tuple[Rule, ...] = ()
    masks: Path | None = None  # an .npz file: for each client id a bool array over its training rows, True is opted in


class AlgorithmChoice(BaseModel):
    """A name of the catalog, and that algorithm's own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "specialist_mixture"
    label: str | None = None  # what tables, figures and folders call it, where one algorithm is compared with itself

    @model_validator(mode="after")
    def _settings_are_known(self) -> "AlgorithmChoice":
        self.options()
        return self

    @property
    def folder(self) -> str:
        """What its runs in a comparison are called on disk."""
        return re.sub(r"[^\w.=-]+", "_", self.label or self.name)

    def options(self) -> Any:
        kind = find(self.name).config
        known = list(getattr(kind, "__dataclass_fields__", {}))
        for key in self.model_extra or {}:
            if key not in known:
                raise ConfigError(f"algorithm.{key} is not a setting of {self.name}. {_nearest(key, known)}")
        try:
            return kind(**(self.model_extra or {}))
        except ValidationError as error:
            raise ConfigError(_explain(error, "algorithm.")) from error


class TrainingConfig(Section):
    """How clients train: in the rounds, from a fresh start on their own, and when they personalise."""

    federated: LocalTraining = LocalTraining()
    local: LocalTraining = LocalTraining(epochs=100)
    personal: LocalTraining = LocalTraining(epochs=100, learning_rate=5e-4)


class ScheduleConfig(Section):
    rounds: PositiveInt = 50
    clients_per_round: PositiveInt | Literal["all"] = 5
    checkpoint_every: PositiveInt = 1
    release: bool = False  # let an algorithm collect the private parts that it declares as a gift
    max_update_norm: PositiveFloat | None = None  # an update that moved further is rejected
    min_clients: PositiveInt = 1  # a round in which fewer replies were accepted is abandoned
    max_abandoned_rounds: PositiveInt = 10  # in a row: then the run stops with an error


class EvaluationConfig(Section):
    clients: PositiveInt | None = None  # personalise and score this many, drawn by the seed; default: all
    every: PositiveInt | None = None  # score the state of every so many rounds too, and of the last: a learning curve
    pooled: PositiveInt | None = (
        None  # score a new client without data on up to so many of everyone's validation examples
    )
    clients_asked: Literal["all", "opted_in", "none"] = "all"  # for scores; the others score themselves and keep them


class EngineConfig(Section):
    name: Literal["embedded"] = "embedded"
    workers: PositiveInt | None = None  # default: one per core
    backend: Literal["auto", "native", "batched", "sequential"] = "auto"
    cohort_size: PositiveInt | None = None  # clients trained together: 1 sequential, 16 batched


class ExperimentConfig(Section):
    name: str = "run"
    seed: NonNegativeInt = 0
    data: DataConfig = DataConfig()
    split: SplitConfig = MajoritySplit()
    opt_out: OptOutConfig = OptOutConfig()
    model: ModelConfig = MlpModel()
    algorithm: AlgorithmChoice = AlgorithmChoice()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    compare: tuple[str | AlgorithmChoice, ...] = ("fedavg", "local_only", "fine_tuned", "specialist_mixture")

    @model_validator(mode="after")
    def _compared_are_known(self) -> "ExperimentConfig":
        folders = [choice.folder for choice in self.choices()]
        for name in folders:
            if folders.count(name) > 1:
                raise ConfigError(f"compare has {name!r} more than once. Give each a label of its own: label = '...'.")
        return self

    def choices(self) -> list[AlgorithmChoice]:
        """What `fedmoe compare` trains, one after the other."""
        return [AlgorithmChoice(name=one) if isinstance(one, str) else one for one in self.compare]


def read_config(path: Path, changes: Sequence[str] = ()) -> ExperimentConfig:
    """Read a TOML file and apply `key.sub=value` changes, whose values are TOML too (or plain text)."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}. Name an existing TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not valid TOML: {error}.") from error
    for change in changes:
        _apply(table, change)
    return parse_config(table)


def parse_config(table: Mapping[str, Any]) -> ExperimentConfig:
    for section, default in (("split", {"kind": "majority"}), ("model", {"name": "mlp"})):
        if isinstance(given := table.get(section), Mapping):
            table = {**table, section: {**default, **given}}
    try:
        return ExperimentConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


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


def _explain(error: ValidationError, prefix: str = "") -> str:
    """The first fault, in the user's words: key, value, why, what to do."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    choice = place.pop(1) if not prefix and len(place) > 1 and place[0] in CHOICES else None
    key = prefix + ".".join(place)
    if fault["type"] == "union_tag_invalid":
        named = fault["ctx"]
        options = re.findall(r"'(\w+)'", named["expected_tags"])
        return f"{key}.{CHOICES[key]}={named['tag']!r} is not known. {_nearest(named['tag'], options)}"
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        if choice:
            beside = f"beside {place[0]}.{CHOICES[place[0]]}={choice!r}"
            return f"the config key {key!r} is not known {beside}. {_nearest(key, _keys_beside(place[0], choice))}"
        return f"the config key {key!r} is not known. {_nearest(key, known_keys())}"
    value = fault.get("input")
    shown = "" if isinstance(value, dict) else f"={value!r}"
    return f"{key}{shown}: {fault['msg'][0].lower()}{fault['msg'][1:]}."


def _nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, cutoff=0.4)
    return f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known) or 'none'}."


def known_keys(model: type[BaseModel] = ExperimentConfig, prefix: str = "") -> list[str]:
    """Every key that a config file may hold, dotted."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
            elif kind is LocalTraining:
                keys += [f"{prefix}{name}.{inner}" for inner in LocalTraining.__dataclass_fields__]
    if model is AlgorithmChoice:
        keys += [prefix + name for entry in CATALOG.values() for name in entry.config.__dataclass_fields__]
    return sorted(set(keys))


def _keys_beside(section: str, choice: str) -> list[str]:
    kinds = get_args(ExperimentConfig.model_fields[section].annotation)
    chosen = [kind for kind in kinds if kind.model_fields[CHOICES[section]].default == choice]
    return [key for kind in chosen for key in known_keys(kind, f"{section}.")]
