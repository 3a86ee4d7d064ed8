"""From the name of a data set to the data set: found in a folder, verified, and read.

Nothing is unpacked to disk and nothing is cached: the publishers' files are read as they are.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedmoe.data.available import VARIABLE, data_folder, find_source, missing_files
from fedmoe.data.dataset import Dataset
from fedmoe.data.digits import load_digits
from fedmoe.data.images import read_cifar10, read_cifar100, read_idx_by_writer, read_idx_set
from fedmoe.data.shakespeare import read_shakespeare
from fedmoe.data.source_spec import Format, SourceSpec
from fedmoe.data.spam import read_spam
from fedmoe.data.synthetic import load_synthetic_regression
from fedmoe.data.text import read_ag_news, read_newsgroups, read_sent140
from fedmoe.errors import DataError

READERS: dict[Format, Callable[[SourceSpec, Path], Dataset]] = {
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


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """The data set of that name, its files checked against the published checksums."""
    source = find_source(name)
    if source.format == "digits":
        return Dataset(source.name, *load_digits(), source.class_names, scale_sixteenths)
    if source.format == "synthetic_regression":
        return load_synthetic_regression(source)
    return READERS[source.format](source, _home(source, folder))


def scale_sixteenths(x: Tensor) -> Tensor:
    """0 … 16, the grey levels of `digits`, to [-1, 1]."""
    return x.to(torch.float32) / 8 - 1


def _home(source: SourceSpec, folder: Path | None) -> Path:
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
