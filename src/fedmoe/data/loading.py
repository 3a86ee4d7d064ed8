"""From the name of a data set to the data set: found in a folder, verified, and read.

Files are looked up in a folder per data set under the folder given, or under the one that FEDMOE_DATA names.
Nothing is unpacked to disk and nothing is cached: the publishers' files are read as they are.
"""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.data.dataset import Dataset
from fedmoe.data.digits import load_digits
from fedmoe.data.images import read_cifar10, read_cifar100, read_idx_by_writer, read_idx_set
from fedmoe.data.registry import SOURCES
from fedmoe.data.shakespeare import read_shakespeare
from fedmoe.data.source_spec import Format, Source
from fedmoe.data.spam import read_spam
from fedmoe.data.synthetic import load_synthetic_regression
from fedmoe.data.text import read_ag_news, read_newsgroups, read_sent140
from fedmoe.errors import ConfigError, DataError

VARIABLE = "FEDMOE_DATA"
READERS: dict[Format, Callable[[Source, Path], Dataset]] = {
    "idx": read_idx_set,
    "idx by writer": read_idx_by_writer,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "ag_news": read_ag_news,
    "newsgroups": read_newsgroups,
    "sent140": read_sent140,
    "shakespeare": read_shakespeare,
    "spam": read_spam,
}


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


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """The data set of that name, its files checked against the published checksums."""
    source = find_source(name)
    if source.format == "digits":
        return Dataset(source.name, *load_digits(), source.class_names, scale_sixteenths)
    if source.format == "synthetic_regression":
        return load_synthetic_regression(source)
    return READERS[source.format](source, _home(source, folder))


def find_source(name: str) -> Source:
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
    return folder if folder is not None else Path(named) if named else None


def scale_sixteenths(x: Tensor) -> Tensor:
    """0 … 16, the grey levels of `digits`, to [-1, 1]."""
    return x.to(torch.float32) / 8 - 1


def _status(source: Source, folder: Path | None) -> SourceStatus:
    missing: tuple[str, ...] = ()
    if source.folder is None:
        where = "comes with scikit-learn" if source.format == "digits" else source.url
    elif folder is None:
        where, missing = f"set {VARIABLE}", tuple(source.files)
    else:
        where, missing = str(folder / source.folder), missing_files(source, folder / source.folder)
    counts = (source.train_rows, source.test_rows, len(source.class_names))
    return SourceStatus(source.name, source.title, *counts, not missing, where, missing)


def missing_files(source: Source, home: Path) -> tuple[str, ...]:
    return tuple(file for file in source.files if not (home / file).is_file())


def _home(source: Source, folder: Path | None) -> Path:
    """The folder of the data set, once all its files are known to be there."""
    base = data_folder(folder)
    if base is None:
        raise DataError(
            f"{source.title} is read from files, but no data folder is given. Set {VARIABLE} to a folder that has "
            f"{source.folder}/ with {', '.join(source.files)} (from {source.url})."
        )
    home = base / str(source.folder)
    missing = missing_files(source, home)
    if missing:
        raise DataError(
            f"{source.title}: {home} lacks {', '.join(missing)}. Run `fedmoe data get {source.name}`, or download them "
            f"from {source.url} into that folder, or set {VARIABLE} to the folder that has {source.folder}/."
        )
    return home
