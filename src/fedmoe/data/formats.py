"""Readers of the publishers' own file formats: packed files, idx (MNIST) and CIFAR's binary records.

Sizes in a header are not trusted: they are compared with the bytes that are really there before anything is allocated.
"""

import gzip
import hashlib
import lzma
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from fedmoe.errors import DataError

REMEDY = "Delete it and download it again from its publisher."
LARGEST = 1 << 30  # bytes; a file that unpacks to more is refused, so a forged archive cannot fill the memory
CHUNK = 1 << 20
CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = math.prod(CIFAR_SHAPE)
CIFAR_RECORD = 1 + CIFAR_PIXELS


def read_content(path: Path, largest: int = LARGEST) -> bytearray:
    """The bytes of a file, unpacked if its name ends in .gz or .xz; at most `largest` of them."""
    if not path.is_file():
        raise DataError(f"{path} is not a file. Put the publisher's file there.")
    kind = {".gz": "gzip", ".xz": "xz"}.get(path.suffix, "")
    try:
        with open_unpacked(path) as file:
            content = read_up_to(file, largest + 1)
    except (gzip.BadGzipFile, lzma.LZMAError) as error:
        raise DataError(f"{path} is not a sound {kind} file ({error}). {REMEDY}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is a truncated or damaged {kind} file ({error}). {REMEDY}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). Check the disk and the file's permissions.") from error
    if len(content) > largest:
        unpacked = " once unpacked" if kind else ""
        raise DataError(f"{path} holds more than the {largest} bytes expected{unpacked}. {REMEDY}")
    if not content:
        raise DataError(f"{path} is empty. {REMEDY}")
    return content


def verify(content: bytes | bytearray, expected: str | None, path: Path) -> None:
    """Compare with the published sha256, if there is one."""
    found = hashlib.sha256(content).hexdigest()
    if expected is not None and found != expected:
        raise DataError(
            f"{path} is not the published file: expected sha256 {expected} of its unpacked content, found {found}. "
            f"{REMEDY}"
        )


def open_unpacked(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return cast(IO[bytes], lzma.open(path)) if path.suffix == ".xz" else path.open("rb")


def read_up_to(file: IO[bytes], limit: int) -> bytearray:
    content = bytearray()
    while len(content) < limit and (chunk := file.read(min(CHUNK, limit - len(content)))):
        content += chunk
    return content


def parse_idx(content: bytearray, path: Path) -> Tensor:
    """An idx file of unsigned bytes: 0 0 8 rank, one big-endian 4-byte size per dimension, then the values."""
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] == 0:
        raise DataError(
            f"{path} is not an idx file of unsigned bytes: it starts with {content[:4].hex(' ')}, "
            f"not with 00 00 08 and its rank. {REMEDY}"
        )
    head = 4 + 4 * content[3]
    if len(content) < head:
        raise DataError(f"{path} is truncated: expected {head} bytes of header, found {len(content)}. {REMEDY}")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, head, 4)]
    expected = head + math.prod(shape)
    if len(content) != expected:
        wrong = "truncated" if len(content) < expected else "too long"
        raise DataError(
            f"{path} is {wrong}: for shape {tuple(shape)} expected {expected} bytes, found {len(content)}. {REMEDY}"
        )
    if expected == head:
        raise DataError(f"{path} is empty: its shape is {tuple(shape)}. {REMEDY}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=head).reshape(shape)


def parse_cifar(content: bytearray, path: Path) -> tuple[Tensor, Tensor]:
    """CIFAR-10 records: a label byte, then 3 x 32 x 32 bytes, channel by channel."""
    labels, x = cifar_records(content, path, num_labels=1)
    return x, as_labels(labels[:, 0], 10, path)


def cifar_records(content: bytearray, path: Path, num_labels: int) -> tuple[Tensor, Tensor]:
    """Label bytes (N, num_labels) and images (N, 3, 32, 32)."""
    size = num_labels + CIFAR_PIXELS
    rows, rest = divmod(len(content), size)
    if rest or not rows:
        expected = (rows + 1) * size
        raise DataError(
            f"{path} is truncated: records have {size} bytes, "
            f"so expected {expected} for {rows + 1} of them, found {len(content)}. {REMEDY}"
        )
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(rows, size))
    return records[:, :num_labels], records[:, num_labels:].reshape(rows, *CIFAR_SHAPE)


def as_labels(values: Tensor, num_classes: int, path: Path) -> Tensor:
    """Labels as int64, every one of them a known class."""
    largest = int(values.max())
    if largest >= num_classes:
        row = int(values.argmax())
        raise DataError(
            f"{path}: row {row} has label {largest}, but labels go from 0 to {num_classes - 1}. "
            f"The file is damaged or of another data set. {REMEDY}"
        )
    return values.to(torch.int64)
