"""Which data sets can be named, where their files belong, and whether they are there. Needs no tensors.

Files are looked up in a folder per data set under the folder given, or under the one that FEDMOE_DATA names.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from fedmoe.data.registry import SOURCES
from fedmoe.data.source_spec import SourceSpec
from fedmoe.errors import ConfigError
from fedmoe.paths import expanded

VARIABLE = "FEDMOE_DATA"


class SourceStatus(NamedTuple):
    """What `fedmoe data list` shows. `where` is the folder it is in, or should be in."""

    name: str
    title: str
    train_rows: int
    test_rows: int
    num_classes: int
    present: bool
    where: str
    missing: tuple[str, ...]


def find_source(name: str) -> SourceSpec:
    if name in SOURCES:
        return SOURCES[name]
    near = get_close_matches(name.lower().replace("-", "_"), SOURCES, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"data.name={name!r} is not a known data set. {hint}Known are: {', '.join(SOURCES)}.")


def list_sources(folder: Path | None = None) -> list[SourceStatus]:
    """Every known data set and whether its files are there (not whether they are sound: loading checks that)."""
    return [_status(source, data_folder(folder)) for source in SOURCES.values()]


def data_folder(folder: Path | None = None) -> Path | None:
    """The folder given, or else the one that FEDMOE_DATA names, if any."""
    named = os.environ.get(VARIABLE)
    return folder if folder is not None else expanded(named) if named else None


def missing_files(source: SourceSpec, home: Path) -> tuple[str, ...]:
    return tuple(file for file in source.files if not (home / file).is_file())


def _status(source: SourceSpec, folder: Path | None) -> SourceStatus:
    missing: tuple[str, ...] = ()
    if source.folder is None:
        where = "comes with scikit-learn" if source.format == "digits" else source.url
    elif folder is None:
        where, missing = f"set {VARIABLE}", tuple(source.files)
    else:
        where, missing = str(folder / source.folder), missing_files(source, folder / source.folder)
    counts = (source.train_rows, source.test_rows, len(source.class_names))
    return SourceStatus(source.name, source.title, *counts, not missing, where, missing)
