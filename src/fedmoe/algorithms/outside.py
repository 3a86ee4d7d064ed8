"""Algorithms that are not in the catalog: factories that a user passes or names, and those of installed packages.

A factory is ``factory(setup)``, or ``factory(config, setup)`` where a dataclass annotates the first argument:
its fields are the algorithm's settings, in a TOML file the other keys of [algorithm].
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe import import_strings
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.errors import ConfigError

GROUP = "fedmoe.algorithms"  # of entry points: what an installed package adds to the names that a config may use
KEY = "algorithm.name"


class Entry(NamedTuple):
    config: type[Any]
    factory: Callable[[Any, AlgorithmSetup], Algorithm]
    title: str
    rounds: str | None  # algorithms with the same word have the same rounds: `compare` trains them once


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NoSettings:
    """Of a factory that takes the setup alone."""


def entry_of(factory: AlgorithmFactory, name: str | None = None) -> Entry:
    """A factory as the catalog lists one; `name` is what a config calls it."""
    name = name or import_strings.name_of(factory)
    import_strings.require_callable(KEY, name, factory)
    config = settings_type(factory, name)

    def make(options: Any, setup: AlgorithmSetup) -> Algorithm:
        made = factory(setup) if config is NoSettings else factory(options, setup)  # type: ignore[call-arg]
        if not isinstance(made, Algorithm):
            raise ConfigError(f"{KEY}={name!r} returned a {type(made).__name__}, not a fedmoe.contract.Algorithm.")
        return made

    return Entry(config, make, getattr(factory, "__name__", type(factory).__name__), None)


def settings_type(factory: AlgorithmFactory, name: str) -> type[Any]:
    """The dataclass of its settings; `NoSettings` for a factory of one argument."""
    wanted = "Write it as factory(setup), or as factory(config: MyConfig, setup) with a dataclass MyConfig"
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}={name!r} is no factory: it does not say its arguments. {wanted}.") from error
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    only_by_name = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    if len(required) == 1 and not only_by_name:
        return NoSettings
    if len(required) != 2 or only_by_name:
        shown = ", ".join([*required, *only_by_name])
        raise ConfigError(f"{KEY}={name!r} is no factory of algorithms: its arguments are ({shown}). {wanted}.")
    kind = _annotation(factory, required[0])
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(
            f"{KEY}={name!r}: its first argument {required[0]!r} must say what its settings are, by a dataclass as "
            f"annotation; {'it has none' if kind is None else f'{kind!r} is none'}. {wanted}."
        )
    return kind


def _annotation(factory: AlgorithmFactory, argument: str) -> Any:
    annotated = factory if inspect.isroutine(factory) else factory.__call__  # type: ignore[operator]
    try:
        return get_type_hints(annotated).get(argument)
    except NameError as error:  # a name that only a type checker imports
        return str(error)


def installed() -> dict[str, list[EntryPoint]]:
    """Names that installed packages add. Nothing of these packages is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def load_installed(name: str, points: list[EntryPoint]) -> Entry:
    values = sorted({point.value for point in points})
    if len(values) > 1:
        raise ConfigError(
            f"{KEY}={name!r} is what several installed packages call an algorithm: {', '.join(values)}. "
            "Name one of these instead."
        )
    factory = import_strings.load(KEY, values[0])
    return entry_of(factory, name)._replace(title=name)
