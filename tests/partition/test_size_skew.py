import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import SizeSkewSplit
from fedmoe.partition.size_skew import log_normal_sizes, split_by_size
from fedmoe.partition.split import Split
from splits import LABELS, SIZES, TEST, TRAIN


def split(labels=LABELS, seed=0, **changes) -> Split:
    return split_by_size(
        labels, SizeSkewSplit(**{**SIZES, "num_clients": 20, "sigma": 1.0, "min_size": 5, **changes}), seed
    )


@settings(max_examples=50, deadline=None)
@given(
    num_clients=st.integers(1, 30),
    num_unseen=st.integers(0, 3),
    sigma=st.floats(0, 1e6),
    min_size=st.integers(1, 20),
    train_size=st.integers(20, 90),
    validation_size=st.integers(1, 30),
    test_size=st.integers(1, 600),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound(num_clients, num_unseen, sigma, min_size, train_size, validation_size, test_size, seed):
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size, "min_size": min_size}
    found = split(num_clients=num_clients, num_unseen=num_unseen, sigma=sigma, seed=seed, **sizes)
    used = np.concatenate([found.train.rows, found.validation.rows])
    assert len(set(used)) == len(used) == (num_clients + num_unseen) * (train_size + validation_size)
    held = found.train.sizes + found.validation.sizes
    assert held.min() >= min_size and found.train.sizes.min() >= 1
    assert all(len(set(found.test.of(c))) == test_size for c in range(num_clients + num_unseen))
    assert np.bincount(TEST[found.global_test]).tolist() == [10] * 10


def test_sizes_are_log_normal_above_the_floor():
    sizes = log_normal_sizes(20_000, 1000, 0.5, 10, seed=0) - 10
    assert np.log(sizes).std() == pytest.approx(0.5, abs=0.02)
    assert sizes.mean() == 990


def test_labels_are_iid_whatever_the_size():
    found = split(num_clients=40, num_unseen=0, train_size=80, sigma=0.0)
    shares = found.class_counts(TRAIN, 10) / 80
    assert np.abs(shares.mean(0) - 0.1).max() < 0.02 and shares.max() < 0.3


def test_own_test_rows_of_two_clients_differ():
    found = split(num_unseen=0, num_clients=2)
    assert set(found.test.of(0)) != set(found.test.of(1))


def test_same_seed_same_split_other_seed_other_split():
    assert split().digest == split().digest
    assert len({split(seed=seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": -0.1}, r"split\.sigma=-0\.1 is not a standard deviation"),
        ({"sigma": float("inf")}, r"split\.sigma=inf is not"),
        ({"min_size": 51}, r"split\.min_size=51 is above the mean of 50 rows"),
        ({"test_size": 601}, r"split\.test_size=601 is more than the 600 test rows.*Lower"),
        ({"num_clients": 79}, r"has 4000\. Lower"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(**changes)


def test_a_hundred_thousand_clients_are_split_whole():
    labels = np.arange(400_000) % 10
    sizes = {"num_clients": 100_000, "num_unseen": 0, "train_size": 3, "validation_size": 1, "min_size": 2}
    found = split(Labels(labels, TEST, 10), **sizes)
    assert found.train.sizes.min() >= 1
