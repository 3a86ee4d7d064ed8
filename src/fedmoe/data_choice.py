"""The section [data] of a config: a data set by name, a function of the user's own, or files of the user's own."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from fedmoe.config_errors import nearest
from fedmoe.errors import ConfigError
from fedmoe.import_strings import is_import_string
from fedmoe.paths import FilePath
from fedmoe.setting_types import PositiveInt


class DataConfig(BaseModel):
    """A name that is an import string is a function: name(seed, **the other keys) -> Federation or Dataset.

    A Dataset is then split; of the keys below `folder` is passed on where it is set.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "digits"
    folder: FilePath | None = None  # default: the environment variable FEDMOE_DATA
    vocabulary_size: PositiveInt = 20_000  # of word-level text: ids that a model knows
    vocabulary: Literal["frequent", "hashed"] = "frequent"  # the words most used in opted-in text, or any by a hash
    max_words: PositiveInt | None = None  # of a text its first ones, of a mail the most frequent; default: all
    num_classes: PositiveInt | None = None  # of npz data; default: as opted-in training and validation rows show
    task: Literal["classification", "regression"] | None = None  # of npz data; default: classification

    @model_validator(mode="after")
    def _named_sets_know_their_classes(self) -> "DataConfig":
        if self.num_classes is not None and self.name != "npz":
            raise ConfigError(f"data.num_classes is for data.name='npz'; {self.name!r} has its own. Remove it.")
        if self.task is not None and self.name != "npz":
            raise ConfigError(f"data.task is for data.name='npz' or 'table'; {self.name!r} has its own. Remove it.")
        return self

    @model_validator(mode="after")
    def _only_functions_have_other_settings(self) -> "DataConfig":
        for key in () if is_import_string(self.name) else self.model_extra or ():
            if key in TableData.model_fields:
                raise ConfigError(f"data.{key} is for data.name='table', not for {self.name!r}. Set or remove it.")
            known = nearest(f"data.{key}", [f"data.{name}" for name in DataConfig.model_fields])
            raise ConfigError(f"the config key 'data.{key}' is not known. {known}")
        return self

    @property
    def has_own_clients(self) -> bool:
        """Whether the files say who holds what, so that there is nothing to split."""
        return self.name == "npz"

    def settings(self) -> dict[str, Any]:
        """Of a function of the user's own."""
        return {**(self.model_extra or {}), **({} if self.folder is None else {"folder": self.folder})}


class TableData(BaseModel):
    """A CSV or parquet file; the keys are the arguments of `federation_from_table`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Literal["table"] = "table"
    file: FilePath
    client: str
    label: str | tuple[str, ...]
    task: Literal["classification", "regression"] = "classification"
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    categories: tuple[str, ...] | dict[str, tuple[str | int | float | bool, ...]] = ()
    classes: tuple[str | int | bool, ...] | None = None
    standardize: bool = False
    unseen: tuple[str, ...] = ()
    validation_share: float = Field(default=0.2, strict=True)
    test_share: float = Field(default=0.2, strict=True)

    @property
    def has_own_clients(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in type(self).model_fields if key not in ("name", "file")}


def _kind(value: Any) -> str:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "table" if name == "table" else "named"


DataChoice = Annotated[
    Annotated[TableData, Tag("table")] | Annotated[DataConfig, Tag("named")],
    Discriminator(_kind),
]
