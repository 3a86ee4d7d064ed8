import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.pachinko import branches_of, client_counts, split_by_pachinko
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import PachinkoSplit
from fedmoe.partition.split import Split

TRAIN = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 100))
TEST = np.random.default_rng(1).permutation(np.repeat(np.arange(20), 20))
COARSE = TRAIN % 4
SIZES = {
    "num_clients": 10,
    "num_unseen": 2,
    "train_size": 40,
    "validation_size": 10,
    "test_size": 15,
    "global_test_size": 40,
}


def split(labels=None, coarse=COARSE, seed=0, **changes) -> Split:
    return split_by_pachinko(labels or Labels(TRAIN, TEST, 20), coarse, PachinkoSplit(**{**SIZES, **changes}), seed)


@settings(max_examples=40, deadline=None)
@given(
    num_clients=st.integers(1, 15),
    num_unseen=st.integers(0, 2),
    log_alpha=st.floats(-4, 3),
    log_beta=st.floats(-4, 3),
    train_size=st.integers(1, 90),
    validation_size=st.integers(1, 25),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound_and_ends(num_clients, num_unseen, log_alpha, log_beta, train_size, validation_size, seed):
    sizes = {"train_size": train_size, "validation_size": validation_size, "seed": seed}
    found = split(num_clients=num_clients, num_unseen=num_unseen, alpha=10**log_alpha, beta=10**log_beta, **sizes)
    used = np.concatenate([found.train.rows, found.validation.rows])
    assert len(set(used)) == len(used)
    assert (found.train.sizes == train_size).all() and (found.validation.sizes == validation_size).all()
    for client in range(num_clients + num_unseen):
        own = set(TRAIN[np.concatenate([found.train.of(client), found.validation.of(client)])])
        drawn = found.test.of(client)
        assert len(set(drawn)) == len(drawn) == min(15, 20 * len(own)) and set(TEST[drawn]) <= own
    assert np.bincount(TEST[found.global_test]).tolist() == [2] * 20


def test_all_data_can_be_used():
    found = split(num_clients=38, num_unseen=2)
    assert sorted([*found.train.rows, *found.validation.rows]) == list(range(len(TRAIN)))


def test_small_alpha_gives_a_client_few_branches_and_small_beta_few_labels_within_them():
    def held(labels: np.ndarray, **changes) -> float:
        found = split(num_clients=8, **changes)
        return float(np.mean([len(set(labels[found.train.of(c)])) for c in range(8)]))

    assert held(COARSE, alpha=1e-3) < 1.7 < 3.7 < held(COARSE, alpha=100.0)
    assert held(TRAIN, alpha=100.0, beta=1e-3) < 5.5 < 15 < held(TRAIN, alpha=100.0, beta=100.0)


def test_draws_follow_both_levels():
    branches = [np.array([0, 1]), np.array([2, 3])]
    supply = np.full(4, 10**6)
    shares = np.stack(
        [client_counts(1000, branches, supply, 1.0, 100.0, np.random.default_rng(seed)) / 1000 for seed in range(300)]
    )
    first = shares[:, :2].sum(1)
    assert first.mean() == pytest.approx(0.5, abs=0.06) and first.std() == pytest.approx(12**-0.5, abs=0.04)
    within = shares[:, 0][first > 0.1] / first[first > 0.1]
    assert within.mean() == pytest.approx(0.5, abs=0.02) and within.std() < 0.09


def test_an_empty_label_leaves_its_part_to_its_branch_and_an_empty_branch_to_the_others():
    branches, supply = [np.array([0, 1]), np.array([2, 3])], np.array([5, 0, 7, 8])
    for seed in range(20):
        counts = client_counts(20, branches, supply, 0.1, 0.1, np.random.default_rng(seed))
        assert counts.tolist() == [5, 0, 7, 8]
        fewer = client_counts(5, branches, np.array([50, 0, 0, 0]), 0.1, 0.1, np.random.default_rng(seed))
        assert fewer.tolist() == [5, 0, 0, 0]


def test_a_label_with_two_coarse_ones_is_refused():
    with pytest.raises(ConfigError, match=r"split\.kind='pachinko' needs a tree, but rows of class 2 .*Give"):
        branches_of(np.array([0, 2, 2]), np.array([0, 1, 0]))


def test_same_seed_same_split_other_seed_other_split():
    assert split().digest == split().digest
    assert len({split(seed=seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, r"split\.alpha=0\.0 is not a positive number"),
        ({"beta": float("nan")}, r"split\.beta=nan is not a positive number"),
        ({"num_clients": 39}, r"need 2050 training examples.*has 2000\. Lower"),
        ({"global_test_size": 401}, r"split\.global_test_size=401 needs 21 examples of class"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(**changes)


def test_five_hundred_clients_of_a_hundred_classes_are_split_whole():
    labels = np.repeat(np.arange(100), 500)
    sizes = {"num_clients": 500, "num_unseen": 0, "train_size": 80, "validation_size": 20, "global_test_size": 100}
    found = split(Labels(labels, labels[::5], 100), labels // 5, **sizes)
    assert len(np.unique(found.train.rows)) == len(found.train.rows) == found.train.sizes.sum() > 0
