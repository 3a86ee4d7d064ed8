"""What a check is given, and how it says what is wrong."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.outside import Entry
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.testing.federation import tiny_setup
from fedmoe.training.backends import Backend


class Subject(NamedTuple):
    """An algorithm with its settings, to be made for the tiny federation; and the backend that is checked."""

    factory: Callable[[AlgorithmSetup], Algorithm]
    backend: Backend = "batched"

    @classmethod
    def of(cls, entry: Entry, config: Any = None, backend: Backend = "batched") -> "Subject":
        """`config` are its settings; default: its own defaults."""
        options = entry.config() if config is None else config
        return cls(lambda setup: entry.factory(options, setup), backend)

    def make(self, backend: Backend | None = None) -> Algorithm:
        return self.factory(tiny_setup(backend or self.backend))


class Check(NamedTuple):
    """`run` raises an AssertionError that says what does not hold; the folder is for its files."""

    run: Callable[[Subject, Path], None]
    applies: Callable[[Algorithm], bool]
    each_backend: bool = True


def require(holds: bool, sentence: str) -> None:
    """An assertion that ``python -O`` keeps."""
    if not holds:
        raise AssertionError(sentence)


def require_same(first: Mapping[str, Any], second: Mapping[str, Any], sentence: str) -> None:
    """Two runs that must agree to the last bit; names the parts in which they differ."""
    different = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    require(not different, f"{sentence}: these differ: {', '.join(sorted(different))}.")
