"""The section [algorithm] of a config: which one, and its own settings."""

import re
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    PydanticSchemaGenerationError,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedmoe.algorithms.catalog import CATALOG, find
from fedmoe.algorithms.outside import Entry
from fedmoe.config_errors import OLD_KEYS, explain, nearest, renamed_key, renamed_value, require_finite
from fedmoe.errors import ConfigError


class AlgorithmChoice(BaseModel):
    """A name of the catalog, an import string or a name of an installed package; that algorithm's settings beside it.

    Defaults are filled in. A factory that was passed as such goes by its import string, whether it can be imported or
    not (`with_algorithm`).
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "specialist_mixture"
    label: str | None = None  # what tables, figures and folders call it, where one algorithm is compared with itself
    _passed: Entry | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _settings_are_known_and_complete(self, info: ValidationInfo) -> "AlgorithmChoice":
        if info.context is not None:
            self._passed = info.context
        options = self.options()
        assert self.model_extra is not None  # extra="allow"
        self.model_extra.update(TypeAdapter(type(options)).dump_python(options, mode="json"))
        return self

    @property
    def entry(self) -> Entry:
        return self._passed or find(self.name)

    @property
    def folder(self) -> str:
        """What its runs in a comparison are called on disk."""
        return re.sub(r"[^\w.=-]+", "_", self.label or self.name)

    @staticmethod
    def more_keys() -> list[str]:
        return [name for entry in CATALOG.values() for name in entry.config.__dataclass_fields__]

    def options(self) -> Any:
        if (new := renamed_value("algorithm.name", self.name)) is not None:
            raise ConfigError(f"algorithm.name={self.name!r} is now called {new!r}.")
        kind, given = self.entry.config, self.model_extra or {}
        known = kind.__dataclass_fields__
        for key, value in given.items():
            if key not in known:
                if f"algorithm.{key}" in OLD_KEYS:
                    raise ConfigError(renamed_key(f"algorithm.{key}", value))
                raise ConfigError(f"algorithm.{key} is not a setting of {self.name}. {nearest(key, list(known))}")
            if isinstance(value, bool) and "bool" not in str(known[key].type):  # pydantic would take true for 1
                raise ConfigError(f"algorithm.{key}={str(value).lower()} is a boolean, and the setting is none.")
        require_finite(given, "algorithm")
        try:
            return TypeAdapter(kind).validate_python(given)  # checks the fields of a plain dataclass too
        except ValidationError as error:
            raise ConfigError(explain(error, AlgorithmChoice, "algorithm.")) from error
        except PydanticSchemaGenerationError as error:
            raise ConfigError(
                f"a config cannot hold the settings of {self.name}: {kind.__name__} has a field that is no number, "
                "text, flag, list or table. Give it types that a TOML file has."
            ) from error
