"""Mails as counts of words: task B of the ECML/PKDD 2006 Discovery Challenge, 15 inboxes of 400 mails."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.formats import REMEDY, read_content, verify
from fedmoe.data.lexicon import as_ids
from fedmoe.data.source_spec import SourceSpec
from fedmoe.errors import DataError

LARGEST_WORD = 157_127  # word ids of task B go from 1 to this; the words themselves were never published
LARGEST_COUNT = (1 << 31) - 1
LABELS = {b"-1": 0, b"1": 1}


def read_spam(source: SourceSpec, home: Path) -> Dataset:
    """Ids and counts (N, 2, L) int32, padded with 0; ids are those of the files plus one. The field is `inbox`.

    All inboxes are training rows: which mails of an inbox are tested is a matter of the split. The test part are the
    100 labelled mails that belong to no inbox.
    """
    parts = [_read_file(source, home, file) for file in source.files]
    xs, ys = zip(*parts[:-1], strict=True)
    inbox = torch.repeat_interleave(torch.arange(len(ys)), torch.tensor([len(y) for y in ys]))
    train = Table(torch.cat(xs), torch.cat(ys), {"inbox": inbox})
    lexicon = ("", *map(str, range(LARGEST_WORD + 1)))
    return Dataset(source.name, train, Table(*parts[-1]), source.class_names, as_ids, lexicon)


def _read_file(source: SourceSpec, home: Path, file: str) -> tuple[Tensor, Tensor]:
    path = home / file
    content = read_content(path, source.largest_file)
    lines = bytes(content).removesuffix(b"\n").split(b"\n")
    length = source.input_shape[-1]
    x_N2L = np.zeros((len(lines), 2, length), dtype=np.int32)
    labels = []
    for number, line in enumerate(lines):
        label, *pairs = line.split() or [b""]
        if label not in LABELS:
            raise DataError(
                f"{path}, line {number + 1} starts with {label[:20]!r}, not with the label 1 or -1. {REMEDY}"
            )
        labels.append(LABELS[label])
        words = _parse_pairs(pairs, path, number + 1)[:, :length]
        x_N2L[number, :, : words.shape[1]] = words
    verify(content, source.files[file], path)
    return torch.from_numpy(x_N2L), torch.tensor(labels)


def _parse_pairs(pairs: list[bytes], path: Path, line: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Ids plus one and counts, the most frequent words first (ties by id): what is cut off says least."""
    try:
        split = [pair.split(b":") for pair in pairs]
        ids, counts = ([int(number) for number in column] for column in zip(*split, strict=True))
    except ValueError as error:
        raise DataError(f"{path}, line {line}: expected pairs word:count of whole numbers. {REMEDY}") from error
    if not (min(ids) >= 1 and max(ids) <= LARGEST_WORD and len(set(ids)) == len(ids)):
        raise DataError(f"{path}, line {line}: word ids must differ and go from 1 to {LARGEST_WORD}. {REMEDY}")
    if not (min(counts) >= 1 and max(counts) <= LARGEST_COUNT):
        raise DataError(f"{path}, line {line}: word counts must go from 1 to {LARGEST_COUNT}. {REMEDY}")
    words = np.array([ids, counts], dtype=np.int64)
    words[0] += 1
    return words[:, np.lexsort((words[0], -words[1]))]
