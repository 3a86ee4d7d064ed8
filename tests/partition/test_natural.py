import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.errors import ConfigError
from fedmoe.partition.natural import split_by_field
from fedmoe.partition.per_client_holdout import HoldoutSizes
from fedmoe.partition.split import Split

TEST = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))


def split(values: np.ndarray, **changes) -> Split:
    return split_by_field(values, TEST, 10, **{"global_test_size": 100, "seed": 0, **changes})


def users(*sizes: int) -> np.ndarray:
    owners = np.repeat(np.arange(len(sizes)) * 3 + 7, sizes)
    return np.random.default_rng(0).permutation(owners)


LIMITS = st.none() | st.integers(1, 60)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=12),
    train_size=LIMITS,
    validation_size=st.none() | st.integers(0, 60),
    test_size=LIMITS,
    shares=st.tuples(st.floats(0, 0.45), st.floats(0.01, 0.5)),
    min_size=st.integers(3, 30),
    num_unseen=st.integers(0, 3),
    seed=st.integers(0, 2**40),
)
def test_every_split_is_sound(sizes, train_size, validation_size, test_size, shares, min_size, num_unseen, seed):
    values = users(*sizes)
    able = sum(size >= min_size for size in sizes)
    parts = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    chosen = {"validation_share": shares[0], "test_share": shares[1], "min_size": min_size, "num_unseen": num_unseen}
    if able <= num_unseen:
        with pytest.raises(ConfigError, match=rf"{able} of {len(sizes)} clients have split\.min_size={min_size} rows"):
            split(values, **parts, **chosen, seed=seed)
        return
    found = split(values, **parts, **chosen, seed=seed)
    assert found.own_test == "train" and found.num_clients == able - num_unseen
    used = np.concatenate([found.train.rows, found.validation.rows, found.test.rows])
    assert len(set(used)) == len(used)
    assert found.train.sizes.min() >= 1 and found.test.sizes.min() >= 1
    wants_validation = shares[0] > 0 if validation_size is None else validation_size > 0
    assert (found.validation.sizes > 0).all() == wants_validation
    for shards, limit in ((found.train, train_size), (found.validation, validation_size), (found.test, test_size)):
        assert limit is None or shards.sizes.max() <= limit
    owners = []
    for client in range(able):
        own = values[np.concatenate([s.of(client) for s in (found.train, found.validation, found.test)])]
        assert len(set(own)) == 1
        owners.append(own[0])
        if train_size is None:
            assert len(own) == (values == own[0]).sum()
    assert len(set(owners)) == able
    assert owners[: found.num_clients] == sorted(owners[: found.num_clients])


def test_fixed_sizes_are_met_where_rows_suffice():
    found = split(users(*[400] * 15), train_size=50, validation_size=0, test_size=350)
    assert (found.train.sizes == 50).all() and (found.test.sizes == 350).all() and not found.validation.rows.size


def test_short_clients_are_cut_in_proportion():
    train, validation, test = HoldoutSizes(50, 0, 350).sizes(np.array([40, 400, 1000]))
    assert train.tolist() == [5, 50, 50] and test.tolist() == [35, 350, 350] and not validation.any()


def test_shares_are_met_and_training_takes_the_rest():
    train, validation, test = HoldoutSizes(validation_share=0.1, test_share=0.25).sizes(np.array([100, 10]))
    assert (train.tolist(), validation.tolist(), test.tolist()) == ([65, 6], [10, 1], [25, 3])


def test_own_test_data_do_not_follow_the_order_of_the_rows():
    found = split(np.zeros(200, dtype=np.int64))
    assert 60 < found.test.rows.mean() < 140


def test_training_clients_stay_when_unseen_ones_are_added():
    values = users(*[20] * 12)
    few, more = split(values, num_clients=5), split(values, num_clients=5, num_unseen=4)
    assert few.train.rows.tolist() == more.train.rows[: len(few.train.rows)].tolist()


def test_the_global_test_is_balanced_as_far_as_labels_reach():
    labels = np.array([0] * 50 + [1] * 50 + [2] * 4)
    found = split_by_field(users(20, 20), labels, 3, global_test_size=30, seed=0)
    assert np.bincount(labels[found.global_test]).tolist() == [13, 13, 4]
    everything = split_by_field(users(20, 20), labels, 3, global_test_size=500, seed=0)
    assert everything.global_test.tolist() == list(range(104))


def test_numbers_that_are_no_classes_are_drawn_from_at_random():
    targets = np.linspace(0, 1, 50, dtype=np.float32)
    found = split_by_field(users(20, 20), targets, 0, global_test_size=30, seed=0)
    assert len(set(found.global_test)) == 30
    assert not split_by_field(users(20), targets[:0], 0, global_test_size=0, seed=0).global_test.size


def test_same_seed_same_split_other_seed_other_split():
    values = users(*[20] * 5)
    assert split(values).digest == split(values).digest
    assert len({split(values, seed=seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 4}, r"split\.num_clients=4 and split\.num_unseen=0 cannot be had: 3 of 4 clients have"),
        ({"num_clients": 0}, r"split\.num_clients=0 .*at least one client"),
        ({"num_unseen": 3}, r"split\.num_clients=all and split\.num_unseen=3"),
        ({"train_size": 0}, r"split\.train_size=0 is below 1"),
        ({"test_size": 0}, r"split\.test_size=0 is below 1"),
        ({"validation_size": -1}, r"split\.validation_size=-1 is below 0"),
        ({"min_size": 2}, r"split\.min_size=2 is too few rows.*Set it to 3"),
        ({"min_size": 1, "validation_size": 0}, r"split\.min_size=1 is too few rows.*Set it to 2"),
        (
            {"validation_share": 0.5, "test_share": 0.5},
            r"split\.validation_share=0\.5 and split\.test_share=0\.5 leave",
        ),
        ({"test_share": float("nan")}, r"split\.test_share=nan leave nothing"),
        ({"global_test_size": -1}, r"split\.global_test_size=-1 cannot be drawn"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split(users(20, 30, 40, 5), **changes)


def test_a_hundred_thousand_clients_are_split_whole():
    values = np.random.default_rng(0).permutation(np.repeat(np.arange(100_000), 10))
    found = split(values, num_unseen=10)
    assert found.num_clients == 99_990
