from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.clients.federation import Federation, Records, examples, federation_from_split, keep, side_by_side
from fedmoe.clients.opt_out import opt_out
from fedmoe.data.dataset import Dataset, Table
from fedmoe.errors import DataError
from fedmoe.partition.majority import split_by_majority
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import MajoritySplit

LABELS = np.repeat(np.arange(4), 50)


def rows(size, start=0):
    number = torch.arange(start, start + size)
    return examples(number[:, None].float().expand(size, 2), number % 3)


def federation(masks=((True,) * 4, (True, False, True, False)), participants=(0, 1)):
    records = [
        Records(rows(4, 10 * c), rows(2, 100), rows(3, 200), torch.tensor(mask), torch.tensor([True, mask[1]]))
        for c, mask in enumerate(masks)
    ]
    return Federation(2, 1, 3, (2,), np.array(participants), rows(5), records.__getitem__, names=["a", "b", "c"])


def test_what_may_be_sent_is_computed_from_opted_in_records_alone():
    data = federation().data([0, 1], opted_in_only=True)
    assert data.train.counts.tolist() == [4, 2]
    assert data.train.x[1, :, 0].tolist() == [10, 12, 0, 0]  # zeros are padding
    assert data.train.y[1, :2].tolist() == [10 % 3, 12 % 3]
    assert data.validation.counts.tolist() == [2, 1]


@pytest.mark.parametrize("opted_in_only", [True, False])
def test_a_part_that_nobody_asks_for_is_not_made(opted_in_only):
    """A round does not look at validation images, and preparing them takes time."""

    class OnlyTraining:
        train, train_opted_in = rows(4), torch.ones(4, dtype=torch.bool)

    data = replace(federation(), load=lambda _client: OnlyTraining()).data([0, 1], opted_in_only=opted_in_only)
    assert data.train.counts.tolist() == [4, 4] and data.train is data.train
    with pytest.raises(AttributeError):
        _ = data.validation


def test_personalisation_sees_all_records():
    data = federation().data([1], opted_in_only=False)
    assert data.train.x[0, :, 0].tolist() == [10, 11, 12, 13] and data.validation.counts.tolist() == [2]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_ragged_clients_lie_side_by_side_with_zeros_behind(sizes):
    together = side_by_side([rows(size, 1) for size in sizes])
    assert together.counts.tolist() == sizes and together.x.shape == (len(sizes), max(sizes), 2)
    for s, size in enumerate(sizes):
        assert torch.equal(together.x[s, :size], rows(size, 1).x) and torch.equal(together.y[s, :size], rows(size, 1).y)
        assert not together.x[s, size:].any() and not together.y[s, size:].any()


def test_keeping_every_row_copies_nothing():
    one = rows(3)
    assert keep(one, torch.ones(3, dtype=torch.bool)) is one
    assert keep(one, torch.tensor([False, True, False])).x[:, 0].tolist() == [1]


def test_only_participants_and_new_clients_may_send():
    assert [federation(participants=(1,)).may_send(client) for client in range(3)] == [False, True, True]
    assert [federation(participants=(0,)).may_send(client) for client in range(3)] == [True, False, True]


def test_clients_are_found_by_name():
    assert federation().number_of("b") == 1 == federation().number_of(1)
    with pytest.raises(DataError, match=r"no client named 'z'. Known: a, b, c"):
        federation().number_of("z")


def test_a_split_is_read_client_by_client_through_prepare():
    table = Table(torch.arange(200)[:, None], torch.from_numpy(LABELS))
    dataset = Dataset("numbers", table, table, ("a", "b", "c", "d"), prepare=lambda x: x.float() / 2)
    sizes = {"train_size": 10, "validation_size": 5, "test_size": 5, "global_test_size": 8}
    settings = MajoritySplit(num_clients=3, num_unseen=1, share=0.8, **sizes)
    split = split_by_majority(Labels(LABELS, LABELS, 4), settings, seed=0)
    made = federation_from_split(dataset, split, opt_out(split, table, clients=[1], seed=0))
    assert (made.num_clients, made.num_unseen, made.num_classes, made.input_shape) == (3, 1, 4, (1,))
    assert made.participants.tolist() == [0, 2] and made.digest == split.digest
    assert torch.bincount(made.global_test.y).tolist() == [2, 2, 2, 2]
    for client in range(4):
        record = made.load(client)
        for part, shards in (
            (record.train, split.train),
            (record.validation, split.validation),
            (record.test, split.test),
        ):
            assert (part.x[:, 0] * 2).long().tolist() == shards.of(client).tolist()
            assert part.y.tolist() == LABELS[shards.of(client)].tolist()
        assert bool(record.train_opted_in.all()) == bool(record.validation_opted_in.all()) == (client != 1)
