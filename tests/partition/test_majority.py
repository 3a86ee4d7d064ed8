import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.majority import majority_pairs, split_by_majority
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import MajoritySplit
from fedmoe.partition.split import Split
from splits import LABELS, SIZES, TEST, TRAIN


def split(labels=LABELS, seed=0, **changes) -> Split:
    return split_by_majority(labels, MajoritySplit(**{**SIZES, "share": 0.6, **changes}), seed)


def counts(labels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.bincount(labels[rows], minlength=10)


@settings(max_examples=60, deadline=None)
@given(
    num_clients=st.integers(1, 12),
    num_unseen=st.integers(0, 3),
    share=st.floats(0.2, 1),
    train_size=st.integers(1, 40),
    validation_size=st.integers(1, 10),
    test_size=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound(num_clients, num_unseen, share, train_size, validation_size, test_size, seed):
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    try:
        found = split(num_clients=num_clients, num_unseen=num_unseen, share=share, seed=seed, **sizes)
    except ConfigError as error:  # the draw may give one class to many clients
        assert "examples of class" in str(error) and share > 0.2
        return
    used = np.concatenate([found.train.rows, found.validation.rows])
    assert len(set(used)) == len(used)
    for shards, size in zip((found.train, found.validation, found.test), sizes.values(), strict=True):
        assert shards.sizes.tolist() == [size] * (num_clients + num_unseen)
    assert counts(TEST, found.global_test).tolist() == [10] * 10
    pairs = majority_pairs(num_clients, num_unseen, 10, "overlapping", seed)
    for client, pair in enumerate(pairs):
        for labels, shards, size in ((TRAIN, found.train, train_size), (TEST, found.test, test_size)):
            held = counts(labels, shards.of(client))
            assert np.abs(held[pair] - size * share / 2).max() < 1 + 1e-6
            assert np.abs(np.delete(held, pair) - size * (1 - share) / 8).max() < 1 + 1e-6
            assert len(set(shards.of(client))) == size


def test_at_two_classes_of_ten_every_client_is_iid():
    assert (split(share=0.2).class_counts(TRAIN, 10) == 4).all()


def test_at_share_one_a_client_holds_its_pair_only():
    held = split(share=1.0).class_counts(TRAIN, 10)
    assert (np.sort(held, axis=1) == [0] * 8 + [20, 20]).all()


def test_two_classes_are_shared_evenly():
    found = split(Labels(TRAIN % 2, TEST % 2, 2), share=1.0)
    assert (found.class_counts(TRAIN % 2, 2) == 20).all()


def test_same_seed_same_split_other_seed_other_split():
    assert split().digest == split().digest
    assert len({split(seed=seed).digest for seed in range(5)}) == 5


def test_clients_keep_their_rows_when_more_clients_join():
    few, more = split(num_unseen=0), split(num_unseen=3)
    for name in ("train", "validation", "test"):
        assert [getattr(few, name).of(c).tolist() for c in range(6)] == [
            getattr(more, name).of(c).tolist() for c in range(6)
        ]


class TestDisjointPairs:
    def test_no_two_training_clients_share_a_class(self):
        pairs = majority_pairs(5, 0, 10, "disjoint", 0)
        assert sorted(pairs.flatten().tolist()) == list(range(10))

    def test_unseen_clients_take_what_is_left_and_then_a_used_pair(self):
        pairs = majority_pairs(4, 4, 10, "disjoint", 0).tolist()
        assert len({tuple(pair) for pair in pairs[:5]}) == 5
        assert all(pair in pairs[:5] for pair in pairs[5:])

    def test_differ_between_seeds(self):
        assert len({majority_pairs(5, 0, 10, "disjoint", seed).tobytes() for seed in range(5)}) == 5

    def test_too_many_clients_are_refused(self):
        with pytest.raises(ConfigError, match=r"split\.num_clients=6 .*needs 12 classes.*has 10.*to 5 at most"):
            split(pairs="disjoint")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 0.1}, r"split\.share=0\.1 is outside \[0\.2, 1\]"),
        ({"share": 1.01}, r"split\.share=1\.01 is outside"),
        ({"share": float("nan")}, r"split\.share=nan is outside"),
        ({"train_size": 0}, r"split\.train_size=0 is below 1"),
        ({"validation_size": -1}, r"split\.validation_size=-1 is below 1"),
        ({"test_size": 0}, r"split\.test_size=0 is below 1"),
        ({"global_test_size": 0}, r"split\.global_test_size=0 is below 1"),
        ({"num_clients": 0}, r"split\.num_clients=0 is below 1"),
        ({"num_unseen": -1}, r"split\.num_unseen=-1 is below 0"),
        ({"num_clients": 10**12}, r"split\.num_clients=1000000000000 .*has 4000\. Lower"),
        (
            {"num_clients": 40, "num_unseen": 39, "share": 1.0},
            r"needs \d+ examples of class \d, but there are 400\. Lower",
        ),
        ({"test_size": 201}, r"split\.test_size=201 needs 6[01] examples of class \d, but there are 60\. Lower"),
        ({"global_test_size": 601}, r"split\.global_test_size=601 needs 61 examples of class"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(**changes)


def test_a_thousand_clients_are_split_whole():
    labels = np.repeat(np.arange(10), 7000)
    found = split(Labels(labels, TEST, 10), num_clients=1000, train_size=50, share=0.3)
    assert len(found.train.rows) == 1002 * 50
