"""Shakespeare by speaking role: 80 characters, and the one that follows."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.formats import REMEDY, read_content, verify
from fedmoe.data.lexicon import FIRST_WORD, UNKNOWN, as_ids
from fedmoe.data.lines import json_lines, require_all
from fedmoe.data.source_spec import SourceSpec
from fedmoe.errors import DataError

STRIDE = 16  # every 16th character is a target: a sixteenth of the memory, and hardly any repetition within a role
LARGEST_CODE = 0x110000


class Windows(NamedTuple):
    x: NDArray[np.uint8]  # (N, L) ids: 0 before the beginning, 1 a character outside the alphabet, 2 … the alphabet
    y: NDArray[np.int64]  # (N,) place of the next character in the alphabet


def read_shakespeare(source: SourceSpec, home: Path) -> Dataset:
    """Windows of a role's speeches joined by newlines. The last tenth of each role's windows is the test part.

    The field `role` is the line of the file. Each role of two characters or more has at least one window.
    """
    (file,) = source.files
    path = home / file
    content = read_content(path, source.largest_file)
    alphabet, (length,) = "".join(source.class_names), source.input_shape
    roles = list[Windows]()
    for line, one in enumerate(json_lines(content, path, {"play": str, "role": str, "speeches": list}), start=1):
        require_all(one["speeches"], str, "speeches", path, line)
        roles.append(windows("\n".join(one["speeches"]), alphabet, length))
    if not sum(len(role.y) for role in roles):
        raise DataError(f"{path} is empty: its roles say nothing. {REMEDY}")
    verify(content, source.files[file], path)
    train, test = (_table(roles, last_tenth) for last_tenth in (False, True))
    return Dataset(source.name, train, test, source.class_names, as_ids, vocabulary_size=FIRST_WORD + len(alphabet))


def windows(text: str, alphabet: str, length: int, stride: int = STRIDE) -> Windows:
    """The characters 1, 1 + stride, … of a text as targets, and the `length` before each, padded at the front.

    >>> windows("abc", alphabet="abc", length=2, stride=1)
    Windows(x=array([[0, 2],
           [2, 3]], dtype=uint8), y=array([1, 2]))
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    ids = np.full(LARGEST_CODE, UNKNOWN, dtype=np.uint8)
    ids[[ord(character) for character in alphabet]] = np.arange(FIRST_WORD, FIRST_WORD + len(alphabet))
    text_ids = ids[codes]
    targets = np.arange(1, len(text_ids), stride)
    targets = targets[text_ids[targets] != UNKNOWN]
    padded = np.concatenate([np.zeros(length, dtype=np.uint8), text_ids])
    return Windows(sliding_window_view(padded, length)[targets], text_ids[targets].astype(np.int64) - FIRST_WORD)


def _table(roles: list[Windows], last_tenth: bool) -> Table:
    cuts = [len(role.y) - len(role.y) // 10 for role in roles]
    kept = [slice(cut, None) if last_tenth else slice(cut) for cut in cuts]
    x = np.concatenate([role.x[rows] for role, rows in zip(roles, kept, strict=True)])
    y = np.concatenate([role.y[rows] for role, rows in zip(roles, kept, strict=True)])
    sizes = [len(role.y[rows]) for role, rows in zip(roles, kept, strict=True)]
    role = torch.from_numpy(np.repeat(np.arange(len(roles)), sizes))
    return Table(torch.from_numpy(x), torch.from_numpy(y), {"role": role})
