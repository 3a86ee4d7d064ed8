import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.dirichlet import class_parts, client_parts, raise_to_floor, split_by_dirichlet
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import DirichletSplit
from fedmoe.partition.split import Split
from splits import LABELS, SIZES, TEST, TRAIN


def split(labels=LABELS, seed=0, **changes) -> Split:
    return split_by_dirichlet(labels, DirichletSplit(**{**SIZES, "alpha": 0.5, "min_size": 5, **changes}), seed)


@settings(max_examples=60, deadline=None)
@given(
    num_clients=st.integers(1, 30),
    num_unseen=st.integers(0, 3),
    log_alpha=st.floats(-3, 3),
    min_size=st.integers(1, 20),
    train_size=st.integers(20, 90),
    validation_size=st.integers(1, 30),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound_and_ends(num_clients, num_unseen, log_alpha, min_size, train_size, validation_size, seed):
    sizes = {"train_size": train_size, "validation_size": validation_size, "min_size": min_size}
    found = split(num_clients=num_clients, num_unseen=num_unseen, alpha=10**log_alpha, seed=seed, **sizes)
    used = np.concatenate([found.train.rows, found.validation.rows])
    assert len(set(used)) == len(used) == (num_clients + num_unseen) * (train_size + validation_size)
    assert np.ptp(np.bincount(TRAIN[used], minlength=10)) <= 1
    held = found.train.sizes + found.validation.sizes
    assert held.min() >= min_size and found.train.sizes.min() >= 1
    assert (found.validation.sizes >= np.minimum(held - 1, 1)).all()
    middle = held * train_size / (train_size + validation_size)
    assert (np.abs(found.train.sizes - middle) <= 1).all()
    assert np.bincount(TEST[found.global_test]).tolist() == [10] * 10


@settings(max_examples=30, deadline=None)
@given(log_alpha=st.floats(-3, 3), seed=st.integers(0, 2**40), test_size=st.integers(1, 200))
def test_own_test_rows_follow_the_clients_own_classes(log_alpha, seed, test_size):
    found = split(alpha=10**log_alpha, seed=seed, test_size=test_size)
    for client in range(8):
        own = TRAIN[np.concatenate([found.train.of(client), found.validation.of(client)])]
        drawn = found.test.of(client)
        assert len(set(drawn)) == len(drawn) == min(test_size, 60 * len(set(own)))
        exact = test_size * np.bincount(own, minlength=10) / len(own)
        if exact.max() <= 59:
            assert np.abs(np.bincount(TEST[drawn], minlength=10) - exact).max() < 1 + 1e-6


def test_small_alpha_puts_a_class_in_few_hands_and_large_alpha_in_all():
    def holders(alpha: float) -> float:
        return float((split(alpha=alpha, min_size=1).class_counts(TRAIN, 10) > 0).sum(0).mean())

    assert holders(0.01) < 3 < 7.9 < holders(1000)


@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e300])
def test_an_alpha_beyond_floating_point_is_its_limit(alpha):
    parts = class_parts(np.array([80, 80, 80]), 8, alpha, 0)
    assert (np.sort(parts, axis=0)[-1] == (10 if alpha > 1 else 80)).all()


def test_the_mean_part_of_a_client_is_even():
    parts = np.mean([class_parts(np.array([1000]), 4, 0.5, seed)[:, 0] for seed in range(300)], axis=0)
    assert parts == pytest.approx([250] * 4, abs=60)


class TestFloor:
    @settings(deadline=None)
    @given(data=st.data(), min_size=st.integers(1, 12))
    def test_moves_rows_from_the_largest_and_loses_none(self, data, min_size):
        rows = st.lists(st.integers(0, 50), min_size=3, max_size=3)
        counts = np.array(
            data.draw(st.lists(rows, min_size=1, max_size=9).filter(lambda c: np.sum(c) >= min_size * len(c)))
        )
        raised = raise_to_floor(counts, min_size)
        before, after = counts.sum(1), raised.sum(1)
        assert raised.min() >= 0 and (raised.sum(0) == counts.sum(0)).all()
        assert (after[before < min_size] == min_size).all() and after.min() >= min_size
        untouched = before[(after == before) & (before >= min_size)]
        gave = after[after < before]
        assert not gave.size or not untouched.size or untouched.max() <= gave.max() + 1

    def test_leaves_clients_alone_that_are_above_it(self):
        counts = np.array([[5, 0], [0, 6]])
        assert (raise_to_floor(counts, 5) == counts).all()


class TestEqualSizes:
    @settings(max_examples=40, deadline=None)
    @given(num_clients=st.integers(1, 70), log_alpha=st.floats(-3, 3), seed=st.integers(0, 2**40))
    def test_every_client_has_the_same_size_and_no_row_is_dealt_twice(self, num_clients, log_alpha, seed):
        found = split(num_clients=num_clients, num_unseen=3, alpha=10**log_alpha, seed=seed, equal_sizes=True)
        used = np.concatenate([found.train.rows, found.validation.rows])
        assert len(set(used)) == len(used)
        assert set(found.train.sizes) == {40} and set(found.validation.sizes) == {10}

    def test_all_rows_can_be_used(self):
        assert client_parts(50, np.full(10, 400), 80, 1.0, seed=0).sum(0).tolist() == [400] * 10

    def test_a_client_draws_its_classes_from_a_dirichlet(self):
        counts_CK = client_parts(1000, np.full(5, 10**9), 400, 1.0, seed=0)
        shares_CK = counts_CK / 1000  # Dir(1, 1, 1, 1, 1): mean 1/5, variance (1/5 · 4/5) / 6
        assert shares_CK.mean(0) == pytest.approx([0.2] * 5, abs=0.03)
        assert shares_CK.var() == pytest.approx(0.16 / 6, rel=0.1)

    def test_unseen_clients_are_not_the_ones_left_with_the_rest(self):
        last = np.mean([client_parts(50, np.full(10, 400), 80, 0.1, seed)[-8:].max(1) for seed in range(20)])
        first = np.mean([client_parts(50, np.full(10, 400), 80, 0.1, seed)[:8].max(1) for seed in range(20)])
        assert last == pytest.approx(first, abs=3)


def test_same_seed_same_split_other_seed_other_split():
    assert split().digest == split().digest
    assert len({split(seed=seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, r"split\.alpha=0\.0 is not a positive number"),
        ({"alpha": -1.0}, r"split\.alpha=-1\.0 is not"),
        ({"alpha": float("nan")}, r"split\.alpha=nan is not"),
        ({"alpha": float("inf")}, r"split\.alpha=inf is not"),
        ({"min_size": 0}, r"split\.min_size=0 is below 1"),
        ({"min_size": 51}, r"split\.min_size=51 is above the mean of 50 rows"),
        ({"train_size": 0}, r"split\.train_size=0 is below 1"),
        ({"num_clients": 79}, r"split\.num_clients=79 .*need 4050 training examples.*has 4000\. Lower"),
        ({"global_test_size": 601}, r"split\.global_test_size=601 needs 61 examples of class"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(**changes)


def test_a_class_that_runs_out_is_named_with_demand_and_supply():
    rare = np.concatenate([TRAIN, np.full(400, 3)])[TRAIN.size - 3600 :]
    rare = np.concatenate([rare[rare != 7], np.full(9, 7)])
    with pytest.raises(ConfigError, match=r"split\.train_size=40 .*needs 40 examples of class 7, but there are 9\. "):
        split(Labels(rare, TEST, 10))


def test_a_thousand_clients_are_split_whole():
    labels = np.repeat(np.arange(10), 7000)
    found = split(Labels(labels, TEST, 10), num_clients=1000, train_size=50, alpha=1e-3)
    assert found.train.sizes.sum() + found.validation.sizes.sum() == 1002 * 60
