import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.quotas import Pools, capped_quotas, quotas, separate
from fedmoe.partition.split import Shards

shares = st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda values: sum(values) > 0.01)
LABELS = np.random.default_rng(0).integers(0, 4, 200)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(total=st.integers(0, 10_000), shares=shares)
def test_quotas_sum_to_the_total_and_stay_within_one_of_the_exact_share(total, shares):
    found = quotas(total, shares, rng())
    assert found.sum() == total
    assert np.abs(found - total * np.array(shares) / sum(shares)).max() < 1 + 1e-6


@given(total=st.integers(0, 10_000), shares=shares)
def test_who_has_no_share_gets_nothing(total, shares):
    assert quotas(total, [0.0, *shares], rng())[0] == 0


def test_ties_are_broken_by_lot():
    winners = {int(np.argmax(quotas(1, [1, 1, 1], rng(seed)))) for seed in range(40)}
    assert winners == {0, 1, 2}


def test_shares_that_divide_evenly_leave_nothing_to_the_lot():
    assert {tuple(quotas(30, [0.1] * 10, rng(seed))) for seed in range(20)} == {(3,) * 10}


@given(total=st.integers(0, 500), shares=shares, data=st.data())
@settings(deadline=None)
def test_capped_quotas_take_all_they_can_within_the_caps(total, shares, data):
    caps = np.array(data.draw(st.lists(st.integers(0, 60), min_size=len(shares), max_size=len(shares))))
    found = capped_quotas(total, shares, caps, rng())
    reachable = int(caps[np.array(shares) > 0].sum())
    assert (found <= caps).all()
    assert found.sum() <= min(total, reachable)
    if min(shares) > 1e-3:  # a share next to nothing counts as none
        assert found.sum() == min(total, reachable)


def test_a_full_class_leaves_its_part_to_the_others():
    assert capped_quotas(10, [0.8, 0.2, 0.0], np.array([4, 9, 9]), rng()).tolist() == [4, 6, 0]


class TestPools:
    def test_dealt_rows_have_the_classes_asked_for_and_none_is_dealt_twice(self):
        demand = np.array([[3, 0, 2, 1], [0, 0, 0, 9], [5, 5, 5, 5]])
        shards = Pools(LABELS, 4, 0, "train").deal(demand)
        assert len(set(shards.rows)) == demand.sum()
        assert [np.bincount(LABELS[shards.of(c)], minlength=4).tolist() for c in range(3)] == demand.tolist()

    def test_a_clients_rows_do_not_depend_on_later_clients(self):
        pools = Pools(LABELS, 4, 0, "train")
        few, many = pools.deal(np.full((2, 4), 3)), pools.deal(np.full((7, 4), 3))
        assert many.rows[: len(few.rows)].tolist() == few.rows.tolist()

    def test_another_seed_deals_other_rows_not_only_another_order(self):
        dealt = [frozenset(Pools(LABELS, 4, seed, "train").deal(np.full((1, 4), 10)).rows) for seed in range(5)]
        assert len(set(dealt)) == 5

    def test_dealt_rows_are_not_grouped_by_class(self):
        labels = LABELS[Pools(LABELS, 4, 0, "train").deal(np.full((1, 4), 10)).rows]
        assert (np.diff(labels) < 0).sum() > 3

    def test_mirrored_rows_repeat_between_clients_but_not_within_one(self):
        shards = Pools(LABELS, 4, 0, "test").mirror(np.full((20, 4), 6), 0, "own test")
        assert all(len(set(shards.of(c))) == 24 for c in range(20))
        assert len(set(shards.rows)) <= len(LABELS) < len(shards.rows)
        assert set(shards.of(0)) != set(shards.of(1))

    def test_a_balanced_draw_has_all_classes_alike(self):
        rows = Pools(LABELS, 4, 0, "test").balanced(82, rng())
        counts = np.bincount(LABELS[rows])
        assert len(set(rows)) == 82 and sorted(counts) == [20, 20, 21, 21]

    def test_a_balanced_draw_beyond_the_rarest_class_is_refused(self):
        with pytest.raises(
            ConfigError, match=r"split\.global_test_size=12 needs 3 examples of class 1, but there are 2"
        ):
            Pools(np.array([0] * 9 + [1] * 2 + [2] * 9 + [3] * 9), 4, 0, "test").balanced(12, rng())


def test_separating_keeps_every_row_with_its_client():
    shards = Shards.from_lists([np.array([5, 6, 7]), np.array([8]), np.array([9, 10])])
    first, rest = separate(shards, np.array([2, 1, 0]))
    assert [first.of(c).tolist() for c in range(3)] == [[5, 6], [8], []]
    assert [rest.of(c).tolist() for c in range(3)] == [[7], [], [9, 10]]
