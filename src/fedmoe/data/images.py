"""Images: MNIST and its kin, with or without the writers, and the two CIFAR sets."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.formats import REMEDY, as_labels, cifar_records, parse_cifar, parse_idx, read_content, verify
from fedmoe.data.npz import read_npz
from fedmoe.data.source_spec import SourceSpec
from fedmoe.errors import DataError

COARSE_CLASSES = 20
WRITERS_FILE = "writers.npz"
WRITER_COLUMNS = ("train_writer", "train_hsf", "test_writer", "test_hsf")


def scale_bytes(x: Tensor) -> Tensor:
    """0 … 255 to [-1, 1]."""
    return x.to(torch.float32) / 127.5 - 1


def read_idx_set(source: SourceSpec, home: Path) -> Dataset:
    files = [file for file in source.files if file != WRITERS_FILE]
    train_x, train_y, test_x, test_y = (_idx_file(source, home, file) for file in files)
    return Dataset(source.name, Table(train_x, train_y), Table(test_x, test_y), source.class_names, scale_bytes)


def read_idx_by_writer(source: SourceSpec, home: Path) -> Dataset:
    """MNIST with the fields `writer` (no writer is in both parts) and `hsf` (0 and 1: employees, 4: students)."""
    plain = read_idx_set(source, home)
    path = home / WRITERS_FILE
    rows = {"train": len(plain.train.y), "test": len(plain.test.y)}
    columns = read_writers(path, rows)
    verify(writer_bytes(columns), source.files[WRITERS_FILE], path)
    tables = {
        part: Table(table.x, table.y, {name: columns[f"{part}_{name}"] for name in ("writer", "hsf")})
        for part, table in (("train", plain.train), ("test", plain.test))
    }
    return Dataset(source.name, tables["train"], tables["test"], source.class_names, scale_bytes)


def read_writers(path: Path, rows: dict[str, int]) -> dict[str, Tensor]:
    """Columns of integers, one value per image."""
    arrays = read_npz(path)
    for name in WRITER_COLUMNS:
        array, expected = arrays.get(name), rows[name.split("_")[0]]
        if array is None or array.dtype.kind not in "iu" or array.shape != (expected,):
            found = "no such array" if array is None else f"{array.dtype} of shape {array.shape}"
            raise DataError(f"{path}: expected {name} to be {expected} integers, found {found}. {REMEDY}")
    return {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in WRITER_COLUMNS}


def writer_bytes(columns: dict[str, Tensor]) -> bytes:
    """What the checksum of the writers is over: their values, however a copy of the file is packed."""
    return b"".join(columns[name].numpy().astype("<i8").tobytes() for name in WRITER_COLUMNS)


def read_cifar10(source: SourceSpec, home: Path) -> Dataset:
    parts = []
    for file, checksum in source.files.items():
        content = read_content(home / file, source.largest_file)
        parts.append(parse_cifar(content, home / file))
        verify(content, checksum, home / file)
    *train, test = parts
    x, y = (torch.cat(columns) for columns in zip(*train, strict=True))
    return Dataset(source.name, Table(x, y), Table(*test), source.class_names, scale_bytes)


def read_cifar100(source: SourceSpec, home: Path) -> Dataset:
    """Fine labels as y; the coarse ones are the field `coarse`. Copies in any order of rows are accepted."""
    rows = (source.train_rows, source.test_rows)
    files = zip(source.files, rows, strict=True)
    train, test = (_cifar100_file(source, home / file, expected) for file, expected in files)
    return Dataset(source.name, train, test, source.class_names, scale_bytes)


def _cifar100_file(source: SourceSpec, path: Path, expected_rows: int) -> Table:
    labels, x = cifar_records(read_content(path, source.largest_file), path, num_labels=2)
    coarse = as_labels(labels[:, 0], COARSE_CLASSES, path)
    fine = as_labels(labels[:, 1], len(source.class_names), path)
    _require_one_coarse_class(fine.numpy(), coarse.numpy(), path)
    if len(fine) != expected_rows:
        raise DataError(f"{path} has {len(fine)} images, but the published file has {expected_rows}. {REMEDY}")
    return Table(x, fine, {"coarse": coarse})


def _require_one_coarse_class(fine: NDArray[np.int64], coarse: NDArray[np.int64], path: Path) -> None:
    """A fine class is in one coarse class: labels read at the wrong place would not be."""
    first = np.zeros(int(fine.max()) + 1, dtype=np.int64)
    first[fine[::-1]] = coarse[::-1]
    wrong = np.flatnonzero(first[fine] != coarse)
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{path}: row {row} puts fine class {fine[row]} into coarse class {coarse[row]}, an earlier row into "
            f"{first[fine[row]]}. The file is damaged or of another data set. {REMEDY}"
        )


def _idx_file(source: SourceSpec, home: Path, file: str) -> Tensor:
    """Images (N, 1, H, W) as bytes, or labels (N,) as int64. The form is checked before the checksum: it says more."""
    path = home / file
    content = read_content(path, source.largest_file)
    values = parse_idx(content, path)
    values = as_labels(values, len(source.class_names), path) if values.dim() == 1 else values.unsqueeze(1)
    verify(content, source.files[file], path)
    return values
