"""From what a publisher sends to the files that are read, where the two differ."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from fedmoe.data.formats import REMEDY, read_content
from fedmoe.data.images import WRITERS_FILE
from fedmoe.data.registry import SOURCES
from fedmoe.data.source_spec import Format, SourceSpec
from fedmoe.data.unpack import read_members
from fedmoe.errors import DataError

QMNIST_COLUMNS = {"hsf": 1, "writer": 2, "seq": 3}
QMNIST_HEAD = 12  # bytes: 0 0 12 2, then the two sizes

Downloads = dict[str, Path]


def convert_newsgroups(source: SourceSpec, downloads: Downloads, target: Path) -> None:
    """20news-bydate-{train,test}/group/number become lines of two files, sorted by group and number."""
    (archive,) = downloads.values()
    parts: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for name, content in read_members(archive, _is_post, source.largest_file):
        folder, group, number = PurePosixPath(name).parts
        parts[folder.rsplit("-", 1)[1]].append((group, int(number), content.decode("latin-1")))
    for part, posts in parts.items():
        with lzma.open(target / f"20news_bydate_{part}.jsonl.xz", "wt", preset=3, encoding="utf-8") as file:
            for group, post, text in sorted(posts):
                file.write(json.dumps({"group": group, "id": post, "text": text}, ensure_ascii=False) + "\n")


def _is_post(name: str) -> bool:
    parts = PurePosixPath(name).parts
    if len(parts) != 3 or parts[0] not in ("20news-bydate-train", "20news-bydate-test"):
        return False
    return parts[2].isdecimal() and len(parts[2]) < 10


def convert_writers(source: SourceSpec, downloads: Downloads, target: Path) -> None:
    """QMNIST's label files, whose test part goes on after MNIST's 10,000 digits, become columns of one file."""
    columns = dict[str, NDArray[np.int16]]()
    for part, rows in (("train", source.train_rows), ("test", source.test_rows)):
        table = parse_qmnist(downloads[f"qmnist-{part}-labels-idx2-int.gz"])
        columns |= {f"{part}_{name}": table[:rows, at].astype(np.int16) for name, at in QMNIST_COLUMNS.items()}
    np.savez_compressed(target / WRITERS_FILE, **columns)  # type: ignore[arg-type]


def parse_qmnist(path: Path) -> NDArray[np.int32]:
    """An idx file of rank 2 with big-endian 4-byte integers: eight per digit."""
    content = read_content(path, SOURCES["mnist"].largest_file)
    rows, width = (int.from_bytes(content[at : at + 4], "big") for at in (4, 8))
    if content[:4] != b"\0\0\x0c\x02" or width != 8 or len(content) != QMNIST_HEAD + 4 * rows * width:
        raise DataError(f"{path} is not an idx file of eight integers per digit. {REMEDY}")
    return np.frombuffer(content, ">i4", offset=QMNIST_HEAD).reshape(rows, width).astype(np.int32)


CONVERTERS: dict[Format, Callable[[SourceSpec, Downloads, Path], None]] = {
    "newsgroups": convert_newsgroups,
    "idx by writer": convert_writers,
}
