"""From the name of a data set to the data set: found in a folder, verified, and read.

Files are looked up in a folder per data set under the folder given, or under the one that FEDMOE_DATA names.
Nothing is unpacked to disk and nothing is cached: the publishers' files are read as they are.
"""

import hashlib
import os
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.digits import load_digits
from fedmoe.data.formats import REMEDY, as_labels, parse_cifar, parse_idx, read_content
from fedmoe.data.known import SOURCES, Source
from fedmoe.errors import ConfigError, DataError

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


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """The data set of that name, its files checked against the published checksums."""
    source = find_source(name)
    if source.folder is None:
        train, test = load_digits()
        return Dataset(source.name, train, test, source.class_names, scale_sixteenths)
    home = _home(source, folder)
    train, test = _read_cifar(source, home) if source.format == "cifar" else _read_idx(source, home)
    return Dataset(source.name, train, test, source.class_names, scale_bytes)


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


def scale_bytes(x: Tensor) -> Tensor:
    """0 … 255 to [-1, 1]."""
    return x.to(torch.float32) / 127.5 - 1


def scale_sixteenths(x: Tensor) -> Tensor:
    """0 … 16, the grey levels of `digits`, to [-1, 1]."""
    return x.to(torch.float32) / 8 - 1


def _status(source: Source, folder: Path | None) -> SourceStatus:
    missing: tuple[str, ...] = ()
    if source.folder is None:
        where = "comes with scikit-learn"
    elif folder is None:
        where, missing = f"set {VARIABLE}", tuple(source.files)
    else:
        where, missing = str(folder / source.folder), _missing(source, folder / source.folder)
    counts = (source.train_rows, source.test_rows, len(source.class_names))
    return SourceStatus(source.name, source.title, *counts, not missing, where, missing)


def _missing(source: Source, home: Path) -> tuple[str, ...]:
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
    missing = _missing(source, home)
    if missing:
        raise DataError(
            f"{source.title}: {home} lacks {', '.join(missing)}. Download them from {source.url} into that folder, "
            f"or set {VARIABLE} to the folder that has {source.folder}/."
        )
    return home


def _verify(content: bytearray, expected: str, path: Path) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is not the published file: expected sha256 {expected} of its unpacked content, found {found}. "
            f"{REMEDY}"
        )


def _read_idx(source: Source, home: Path) -> tuple[Table, Table]:
    train_x, train_y, test_x, test_y = (_idx_file(source, home, file) for file in source.files)
    return Table(train_x, train_y), Table(test_x, test_y)


def _idx_file(source: Source, home: Path, file: str) -> Tensor:
    """Images (N, 1, H, W) as bytes, or labels (N,) as int64. The form is checked before the checksum: it says more."""
    path = home / file
    content = read_content(path, source.largest_file)
    values = parse_idx(content, path)
    values = as_labels(values, len(source.class_names), path) if values.dim() == 1 else values.unsqueeze(1)
    _verify(content, source.files[file], path)
    return values


def _read_cifar(source: Source, home: Path) -> tuple[Table, Table]:
    *train, test = (_cifar_file(source, home, file) for file in source.files)
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Table(x, y), Table(*test)


def _cifar_file(source: Source, home: Path, file: str) -> tuple[Tensor, Tensor]:
    path = home / file
    content = read_content(path, source.largest_file)
    x, y = parse_cifar(content, path)
    _verify(content, source.files[file], path)
    return x, y
