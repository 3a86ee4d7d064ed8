"""Words as numbers: the complete lexicon of a data set, and the smaller vocabulary that a model may know.

The lexicon is a way to store text, and no model sees it. A vocabulary is shared by everybody, so it is drawn from rows
that may be shared. The lexicon is sorted: ids of two words compare as the words do, whatever other rows hold, so ties
between equally frequent words are not broken by private text either.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.dataset import Dataset, Table
from fedmoe.errors import ConfigError

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def tokenize(text: str, limit: int) -> list[str]:
    """The first `limit` words, in lower case: runs of letters and digits, apostrophes within them kept.

    >>> tokenize("Don't panic -- it's 42!", limit=4)
    ["don't", 'panic', "it's", '42']
    """
    return [found.group() for found in islice(WORD.finditer(text.lower()), limit)]


def encode(parts: Sequence[Sequence[str]], length: int) -> tuple[list[Tensor], tuple[str, ...]]:
    """Each part's texts as ids (N, length) int32, padded with 0 at the end, and the lexicon of all parts."""
    words = [[tokenize(text, length) for text in texts] for texts in parts]
    lexicon = ("", *sorted(set(chain.from_iterable(chain.from_iterable(words)))))
    ids = {word: number for number, word in enumerate(lexicon)}
    return [_as_rows(rows, ids, length) for rows in words], lexicon


def _as_rows(rows: Sequence[Sequence[str]], ids: dict[str, int], length: int) -> Tensor:
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = np.fromiter((ids[word] for row in rows for word in row), dtype=np.int32, count=int(sizes.sum()))
    x_NL = np.zeros((len(rows), length), dtype=np.int32)
    x_NL[np.arange(length) < sizes[:, None]] = flat
    return torch.from_numpy(x_NL)


def as_ids(x: Tensor) -> Tensor:
    """Stored ids as int64, which every layer accepts as an index."""
    return x.to(torch.int64)


def keep_words(dataset: Dataset, count: int) -> Dataset:
    """The same data set with shorter rows: the first words of a text, or the most frequent ones of a mail."""

    def cut(table: Table) -> Table:
        return replace(table, x=table.x[..., :count].contiguous())

    return replace(dataset, train=cut(dataset.train), test=cut(dataset.test))


def limit_vocabulary(dataset: Dataset, rows: NDArray[np.int64], size: int) -> Dataset:
    """The same data set, prepared with a vocabulary that only the training rows `rows` determine.

    A model then meets `size` ids: 0 for padding, 1 for an unknown word, and 2 … for the size - 2 most frequent words.
    Its size does not depend on the rows: with few of them, the last ids stay unused.
    """
    if dataset.lexicon is None:
        raise ConfigError(f"{dataset.name} has no words, so it has no vocabulary to limit. Leave the setting out.")
    if size <= FIRST_WORD:
        raise ConfigError(f"a vocabulary of {size} ids has no word: 0 is padding and 1 is unknown. Set 3 or more.")
    words = frequent_words(dataset, rows, size - FIRST_WORD)
    table = torch.full((len(dataset.lexicon),), UNKNOWN)
    table[PADDING] = PADDING
    table[words] = torch.arange(FIRST_WORD, FIRST_WORD + len(words))
    return replace(dataset, prepare=partial(look_up, table), vocabulary_size=size)


def hash_vocabulary(dataset: Dataset, size: int) -> Dataset:
    """The same with `size` ids to which words are hashed: nothing is learnt from any row, so nothing leaks.

    0 is padding and 1, which no word has, stays unused. Different words may share an id.
    """
    if dataset.lexicon is None:
        raise ConfigError(f"{dataset.name} has no words, so it has no vocabulary to hash. Leave the setting out.")
    if size <= FIRST_WORD:
        raise ConfigError(f"a vocabulary of {size} ids has no word: 0 is padding and 1 is unknown. Set 3 or more.")
    hashes = [zlib.crc32(word.encode()) % (size - FIRST_WORD) + FIRST_WORD for word in dataset.lexicon]
    table = torch.tensor(hashes)
    table[PADDING] = PADDING
    return replace(dataset, prepare=partial(look_up, table), vocabulary_size=size)


def frequent_words(dataset: Dataset, rows: NDArray[np.int64], count: int) -> Tensor:
    """Lexicon ids of the words that these training rows use most, ties by id; words they never use are left out."""
    used = dataset.train.x[torch.from_numpy(np.unique(rows))]
    ids, weights = (used[:, 0], used[:, 1]) if used.dim() == 3 else (used, None)
    uses = np.bincount(
        ids.reshape(-1).numpy(),
        None if weights is None else weights.reshape(-1).numpy(),
        minlength=len(dataset.lexicon or ()),
    )
    uses[PADDING] = 0
    order = np.argsort(-uses, kind="stable")[: min(count, int((uses > 0).sum()))]
    return torch.from_numpy(order.astype(np.int64))


def look_up(table: Tensor, x: Tensor) -> Tensor:
    """Ids (N, L), or ids and counts (N, 2, L), with the ids replaced by those of the table."""
    if x.dim() == 3:
        return torch.stack([table[x[:, 0].to(torch.int64)], x[:, 1].to(torch.int64)], dim=1)
    return table[x.to(torch.int64)]
