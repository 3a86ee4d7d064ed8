from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.data.dataset import Dataset, Table
from fedmoe.data.lexicon import as_ids, encode, keep_words, limit_vocabulary, tokenize
from fedmoe.errors import ConfigError

TEXTS = st.lists(st.text(alphabet="abcd ", max_size=12), min_size=1, max_size=8)


def texts_as_dataset(texts: list[str]) -> Dataset:
    (x,), lexicon = encode([texts], 6)
    table = Table(x, torch.zeros(len(texts), dtype=torch.int64))
    return Dataset("texts", table, table, ("a", "b"), as_ids, lexicon)


def known_words(dataset: Dataset) -> dict[str, int]:
    """The words that a model can tell apart, and the ids it gets for them."""
    ids = dataset.prepare(torch.arange(len(dataset.lexicon))[None])[0].tolist()
    return {word: number for word, number in zip(dataset.lexicon, ids, strict=True) if number > 1}


def test_the_most_frequent_words_are_numbered_from_two():
    texts = texts_as_dataset(["b b a c", "c a c d"])
    limited = limit_vocabulary(texts, np.arange(2), size=4)
    assert known_words(limited) == {"c": 2, "a": 3}  # a and b are equally frequent: the first in the lexicon is taken
    assert limited.prepare(limited.train.x).tolist() == [[1, 1, 3, 2, 0, 0], [2, 3, 2, 1, 0, 0]]
    assert (limited.vocabulary_size, limited.train) == (4, texts.train)


@settings(deadline=None)
@given(allowed=TEXTS, private=TEXTS, others=TEXTS, size=st.integers(3, 8))
def test_rewriting_rows_that_are_not_allowed_changes_nothing(allowed, private, others, size):
    rows = np.arange(len(allowed))
    vocabularies = [limit_vocabulary(texts_as_dataset(allowed + rest), rows, size) for rest in (private, others)]
    assert known_words(vocabularies[0]) == known_words(vocabularies[1])
    prepared = [one.prepare(one.train.x[: len(allowed)]) for one in vocabularies]
    assert torch.equal(*prepared)


def test_words_of_other_rows_are_unknown_and_the_size_tells_nothing_of_the_rows():
    limited = limit_vocabulary(texts_as_dataset(["a a", "secret"]), np.array([0]), size=100)
    assert limited.prepare(limited.train.x[1:])[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert limited.vocabulary_size == 100


def test_a_row_that_is_named_twice_counts_once():
    texts = texts_as_dataset(["a", "b b"])
    assert known_words(limit_vocabulary(texts, np.array([0, 0, 0, 1]), size=3)) == {"b": 2}


def test_without_rows_every_word_is_unknown():
    assert known_words(limit_vocabulary(texts_as_dataset(["a"]), np.zeros(0, dtype=np.int64), size=3)) == {}


def test_counts_weigh_words_and_stay_as_they_are():
    x = torch.tensor([[[2, 3, 0], [1, 9, 0]], [[2, 4, 0], [1, 1, 0]]], dtype=torch.int32)
    table = Table(x, torch.zeros(2, dtype=torch.int64))
    mails = Dataset("mails", table, table, ("a", "b"), as_ids, ("", "0", "1", "2", "3"))
    limited = limit_vocabulary(mails, np.arange(2), size=4)
    assert limited.prepare(x).tolist() == [[[3, 2, 0], [1, 9, 0]], [[3, 1, 0], [1, 1, 0]]]


def test_a_text_keeps_its_first_words_and_a_mail_its_most_frequent():
    texts = keep_words(texts_as_dataset(["b b a c"]), 3)
    assert texts.train.x.tolist() == [[2, 2, 1]] and texts.input_shape == (3,)
    table = Table(torch.tensor([[[2, 3, 1], [9, 4, 1]]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    mails = keep_words(Dataset("mails", table, table, ("a", "b"), as_ids, ("", "0", "1", "2")), 2)
    assert mails.test.x.tolist() == [[[2, 3], [9, 4]]]


@pytest.mark.parametrize("size", [-1, 0, 2])
def test_a_vocabulary_without_words_is_refused(size):
    with pytest.raises(ConfigError, match="Set 3 or more"):
        limit_vocabulary(texts_as_dataset(["a"]), np.arange(1), size)


def test_pictures_have_no_vocabulary():
    with pytest.raises(ConfigError, match="has no words"):
        limit_vocabulary(replace(texts_as_dataset(["a"]), lexicon=None), np.arange(1), 10)


@given(st.text(max_size=30), st.integers(1, 5))
def test_any_text_becomes_words_without_spaces(text, limit):
    words = tokenize(text, limit)
    assert len(words) <= limit and all(word and not word.isspace() for word in words)
