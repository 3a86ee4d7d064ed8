"""Small stand-ins for the published files, in their formats, and a list of sources that expects them."""

import csv
import gzip
import hashlib
import io
import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedmoe.data.images import writer_bytes
from fedmoe.data.registry import SOURCES
from fedmoe.data.source_spec import SourceSpec

FROM_FILES = [name for name, source in SOURCES.items() if source.folder]
TRAIN_ROWS, TEST_ROWS = 12, 6
FIXED_ROWS = ("cifar100", "newsgroups", "ag_news", "mnist_by_writer")  # sets whose published number of rows is required


def idx(*shape: int) -> bytes:
    values = np.random.default_rng(len(shape)).integers(0, 10, shape, dtype=np.uint8)
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + values.tobytes()


def cifar(rows: int, num_labels: int = 1) -> bytes:
    records = np.random.default_rng(rows).integers(0, 256, (rows, 3072 + num_labels), dtype=np.uint8)
    records[:, 0] %= 10
    if num_labels == 2:
        records[:, 1] = 5 * records[:, 0]
    return records.tobytes()


def ag_news(rows: int) -> bytes:
    file = io.StringIO(newline="")
    rows_of_text = [[row % 4 + 1, f"Title {row}", f'It\'s "news" {row}\nof the day.'] for row in range(rows)]
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows_of_text)
    return file.getvalue().encode()


def lines(records: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def posts(rows: int) -> bytes:
    groups = SOURCES["newsgroups"].class_names
    head = "From: a\nNewsgroups: {}\n\n"
    return lines(
        [{"group": (g := groups[row % 20]), "id": row, "text": head.format(g) + f"post {row} é"} for row in range(rows)]
    )


def tweets(rows: int) -> bytes:
    return lines([{"user": user, "x": ["so good", f"bad day {user}"], "y": [1, 0]} for user in range(rows)])


def roles(rows: int) -> bytes:
    return lines([{"play": "P", "role": f"R{row}", "speeches": ["To be, or not." * row, "Ay."]} for row in range(rows)])


def mails(rows: int) -> bytes:
    return "".join(f"{1 if row % 2 else -1} 1:2 {row + 2}:{row + 1} 157127:1\n" for row in range(rows)).encode()


def writers() -> tuple[bytes, str]:
    """The file, and the checksum of its values."""
    rows = {"train": TRAIN_ROWS, "test": TEST_ROWS}
    columns = {f"{p}_{c}": np.arange(rows[p], dtype=np.int16) // 3 for p in rows for c in ("writer", "hsf")}
    file = io.BytesIO()
    np.savez(file, **columns)
    tensors = {name: torch.from_numpy(column.astype(np.int64)) for name, column in columns.items()}
    return file.getvalue(), hashlib.sha256(writer_bytes(tensors)).hexdigest()


def content_of(source: SourceSpec, file: str) -> bytes:
    rows = TEST_ROWS if file.startswith(("t10k", "test")) or "_test" in file else TRAIN_ROWS
    if source.format in ("idx", "idx by writer"):
        return writers()[0] if file == "writers.npz" else idx(rows, 28, 28) if "images" in file else idx(rows)
    make = {"cifar10": cifar, "ag_news": ag_news, "newsgroups": posts, "sent140": tweets, "shakespeare": roles}
    if source.format == "cifar100":
        return cifar(rows, num_labels=2)
    return mails(rows) if source.format == "spam" else make[source.format](rows)


def packed(file: str, content: bytes) -> bytes:
    if file.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return lzma.compress(content) if file.endswith(".xz") else content


def unpacked(file: str, content: bytes) -> bytes:
    if file.endswith(".gz"):
        return gzip.decompress(content)
    return lzma.decompress(content) if file.endswith(".xz") else content


def stand_in(name: str) -> SourceSpec:
    """The source as it would be if the stand-ins were the published files."""
    source = SOURCES[name]
    checksums = {}
    for file, known in source.files.items():
        sha256 = writers()[1] if file == "writers.npz" else hashlib.sha256(content_of(source, file)).hexdigest()
        checksums[file] = None if known is None else sha256
    rows = {"train_rows": TRAIN_ROWS, "test_rows": TEST_ROWS} if name in FIXED_ROWS else {}
    return replace(source, files=checksums, **rows)


def write_files(name: str, folder: Path) -> None:
    source = SOURCES[name]
    home = folder / str(source.folder)
    home.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        (home / file).write_bytes(packed(file, content_of(source, file)))
