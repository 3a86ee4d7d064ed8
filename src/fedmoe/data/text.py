"""Texts with a label: AG News, 20 Newsgroups, and Sentiment140 by user."""

import csv
import io
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.formats import REMEDY, read_content, verify
from fedmoe.data.lexicon import as_ids, encode
from fedmoe.data.lines import decode, json_lines, require_all, require_rows
from fedmoe.data.source_spec import SourceSpec
from fedmoe.errors import DataError

BLANK_LINE = re.compile(r"\r?\n\r?\n")
CUT_SEED = 140  # fixed: the cut into training and test part belongs to the data set, not to a run

LabelledTexts = tuple[list[str], list[int]]


def read_ag_news(source: SourceSpec, home: Path) -> Dataset:
    """Title and description. The training file may hold any number of rows (parts of it circulate), the test all."""
    parts = [_ag_news_file(source, home, file) for file in source.files]
    require_rows(len(parts[1][1]), source.test_rows, home / list(source.files)[1])
    return _dataset(source, parts)


def _ag_news_file(source: SourceSpec, home: Path, file: str) -> LabelledTexts:
    path = home / file
    content = read_content(path, source.largest_file)
    classes = {str(number): number - 1 for number in range(1, len(source.class_names) + 1)}
    if not content.endswith(b"\n"):  # a row cut within a field can look complete
        raise DataError(f"{path} is truncated: its last row has no end of line. {REMEDY}")
    texts, labels = list[str](), list[int]()
    reader = csv.reader(io.StringIO(decode(content, path), newline=""), strict=True)
    try:
        for row in reader:
            if len(row) != 3 or row[0] not in classes:
                shown = ",".join(row)[:40]
                raise DataError(
                    f"{path}, line {reader.line_num}: expected class (1 to {len(classes)}), title, description, and no "
                    f"header; found {len(row)} columns: {shown!r}. {REMEDY}"
                )
            texts.append(f"{row[1]} {row[2]}")
            labels.append(classes[row[0]])
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not CSV ({error}). {REMEDY}") from error
    verify(content, source.files[file], path)
    return texts, labels


def read_newsgroups(source: SourceSpec, home: Path) -> Dataset:
    """Posts without their headers, which name the group. The field `group` is the label again: a natural client."""
    rows = (source.train_rows, source.test_rows)
    parts = [_newsgroups_file(source, home, *file) for file in zip(source.files, rows, strict=True)]
    groups = [{"group": torch.tensor(labels)} for _, labels in parts]
    return _dataset(source, parts, groups)


def _newsgroups_file(source: SourceSpec, home: Path, file: str, expected_rows: int) -> LabelledTexts:
    path = home / file
    content = read_content(path, source.largest_file)
    numbers = {name: number for number, name in enumerate(source.class_names)}
    texts, labels = list[str](), list[int]()
    for line, post in enumerate(json_lines(content, path, {"group": str, "text": str}), start=1):
        if post["group"] not in numbers:
            raise DataError(f"{path}, line {line}: {post['group'][:60]!r} is none of the 20 newsgroups. {REMEDY}")
        texts.append(strip_headers(post["text"]))
        labels.append(numbers[post["group"]])
    require_rows(len(labels), expected_rows, path)
    verify(content, source.files[file], path)
    return texts, labels


def strip_headers(post: str) -> str:
    """What follows the first blank line.

    >>> strip_headers("Newsgroups: sci.space\\nLines: 1\\n\\nLift off.")
    'Lift off.'
    """
    return BLANK_LINE.split(post, maxsplit=1)[-1]


def read_sent140(source: SourceSpec, home: Path) -> Dataset:
    """Tweets with the field `user`. A fixed draw of a tenth of all rows is the test part."""
    (file,) = source.files
    path = home / file
    content = read_content(path, source.largest_file)
    texts, labels, users = list[str](), list[int](), list[int]()
    for line, one in enumerate(json_lines(content, path, {"user": int, "x": list, "y": list}), start=1):
        require_all(one["x"], str, "x", path, line)
        require_all(one["y"], int, "y", path, line)
        if len(one["x"]) != len(one["y"]) or not set(one["y"]) <= {0, 1} or not 0 <= one["user"] < 1 << 31:
            raise DataError(f"{path}, line {line}: expected a user number and a label 0 or 1 per tweet. {REMEDY}")
        texts += one["x"]
        labels += one["y"]
        users += [one["user"]] * len(one["y"])
    if not labels:
        raise DataError(f"{path} is empty: it has no tweet. {REMEDY}")
    verify(content, source.files[file], path)
    return _cut(source, texts, torch.tensor(labels), torch.tensor(users))


def _cut(source: SourceSpec, texts: list[str], y: Tensor, user: Tensor) -> Dataset:
    (x,), lexicon = encode([texts], source.input_shape[0])
    draws = np.random.default_rng(CUT_SEED).random(len(texts))
    order, num_test = torch.from_numpy(np.argsort(draws, kind="stable")), len(texts) // 10
    parts = (order[num_test:].sort().values, order[:num_test].sort().values)
    train, test = (Table(x[rows], y[rows], {"user": user[rows]}) for rows in parts)
    return Dataset(source.name, train, test, source.class_names, as_ids, lexicon)


def _dataset(source: SourceSpec, parts: list[LabelledTexts], fields: list[dict[str, Tensor]] | None = None) -> Dataset:
    xs, lexicon = encode([texts for texts, _ in parts], source.input_shape[0])
    columns = fields or [{}, {}]
    ys = (torch.tensor(labels) for _, labels in parts)
    train, test = (Table(*part) for part in zip(xs, ys, columns, strict=True))
    return Dataset(source.name, train, test, source.class_names, as_ids, lexicon)
