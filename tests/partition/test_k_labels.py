import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.k_labels import split_by_k_labels
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import KLabelsSplit
from fedmoe.partition.split import Split
from splits import LABELS, SIZES, TEST, TRAIN


def split(labels=LABELS, seed=0, **changes) -> Split:
    return split_by_k_labels(labels, KLabelsSplit(**{**SIZES, "labels_per_client": 4, **changes}), seed)


def label_sets(found: Split) -> list[frozenset[int]]:
    return [frozenset(TRAIN[found.train.of(c)].tolist()) for c in range(found.num_clients + found.num_unseen)]


@settings(max_examples=50, deadline=None)
@given(
    num_clients=st.integers(1, 20),
    num_unseen=st.integers(0, 3),
    labels=st.integers(1, 9),
    train_size=st.integers(9, 60),
    validation_size=st.integers(1, 20),
    test_size=st.integers(1, 60),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound(num_clients, num_unseen, labels, train_size, validation_size, test_size, seed):
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    counts = {"num_clients": num_clients, "num_unseen": num_unseen, "labels_per_client": labels}
    try:
        found = split(**sizes, **counts, seed=seed)
    except ConfigError as error:
        assert "sets of split.labels_per_client" in str(error) and labels in (1, 9) and num_clients >= 10
        return
    used = np.concatenate([found.train.rows, found.validation.rows])
    assert len(set(used)) == len(used)
    for shards, size in zip((found.train, found.validation, found.test), sizes.values(), strict=True):
        assert shards.sizes.tolist() == [size] * (num_clients + num_unseen)
    sets = label_sets(found)
    assert {len(one) for one in sets} == {labels}
    assert not set(sets[num_clients:]) & set(sets[:num_clients])
    for client, own in enumerate(sets):
        assert np.ptp(np.bincount(TRAIN[found.train.of(client)], minlength=10)[list(own)]) <= 1
        drawn = found.test.of(client)
        assert len(set(drawn)) == test_size and set(TEST[drawn]) <= own
        assert np.ptp(np.bincount(TEST[drawn], minlength=10)[list(own)]) <= 1
    assert np.bincount(TEST[found.global_test]).tolist() == [10] * 10


@pytest.mark.parametrize("seed", range(5))
def test_all_data_can_be_used_whatever_the_seed(seed):
    found = split(num_clients=100, num_unseen=0, train_size=32, validation_size=8, seed=seed)
    assert len(found.train.rows) + len(found.validation.rows) == len(TRAIN)
    assert split(num_clients=78, num_unseen=0, seed=seed).num_clients == 78  # 50 rows are not four equal parts


def test_anchors_share_no_label_and_come_first():
    sets = label_sets(split(num_clients=20, num_anchors=5, labels_per_anchor=2))
    assert all(not a & b for a, b in itertools.combinations(sets[:5], 2))
    assert {len(one) for one in sets[:5]} == {2} and {len(one) for one in sets[5:]} == {4}


def test_unseen_clients_may_share_a_set_where_none_is_left_if_that_is_asked_for():
    with pytest.raises(ConfigError, match=r"split\.num_unseen=2 .*all 1 sets of split\.labels_per_client=10 .*'any'"):
        split(labels_per_client=10)
    assert len(set(label_sets(split(labels_per_client=10, unseen_labels="any")))) == 1


def test_the_last_free_set_is_found():
    sets = label_sets(split(num_clients=9, num_unseen=2, labels_per_client=1, train_size=4))
    assert len(set(sets[:9])) == 9 and sets[9] == sets[10] and len(set(sets)) == 10


def test_rare_classes_are_used_less():
    rare = np.concatenate([TRAIN[TRAIN != 3], np.full(40, 3)])
    found = split(Labels(rare, TEST, 10), num_clients=60, labels_per_client=2)
    uses = (found.class_counts(rare, 10) > 0).sum(0)
    assert uses[3] == 1 and uses[:3].min() > 10


def test_same_seed_same_split_other_seed_other_split():
    assert split().digest == split().digest
    assert len({split(seed=seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels_per_client": 0}, r"split\.labels_per_client=0 is outside \[1, 10\]"),
        ({"labels_per_client": 11}, r"split\.labels_per_client=11 is outside"),
        ({"train_size": 3}, r"split\.labels_per_client=4 is above split\.train_size=3.*Lower"),
        ({"num_anchors": 7}, r"split\.num_anchors=7 is outside \[0, 6\]"),
        ({"num_anchors": 6}, r"split\.num_anchors=6 with split\.labels_per_anchor=2 need 12 labels.*has 10\. Lower"),
        ({"num_clients": 79}, r"split\.num_clients=79 .*need 4050 training examples.*has 4000\. Lower"),
        ({"test_size": 241}, r"split\.test_size=241 needs 61 examples of class"),
        ({"validation_size": 0}, r"split\.validation_size=0 is below 1"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(**changes)


def test_a_thousand_clients_are_split_whole():
    labels = np.repeat(np.arange(10), 7000)
    found = split(Labels(labels, TEST, 10), num_clients=1000, unseen_labels="any")
    assert len(np.unique(found.train.rows)) == len(found.train.rows) == found.train.sizes.sum() > 0
