import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.aggregation.averaging import weighted_mean


def test_the_mean_is_weighted_leaf_by_leaf():
    trees = {
        4: {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.0)},
        2: {"a": torch.tensor([4.0, 8.0]), "b": torch.tensor(3.0)},
    }
    mean = weighted_mean(trees, {4: 1, 2: torch.tensor(2.0)})
    torch.testing.assert_close(mean, {"a": torch.tensor([3.0, 6.0]), "b": torch.tensor(2.0)})


@settings(deadline=None)
@given(
    clients=st.dictionaries(
        st.integers(0, 99),
        st.tuples(st.floats(-100, 100, width=32), st.floats(0.125, 1000, width=32)),
        min_size=1,
        max_size=6,
    )
)
def test_the_mean_lies_between_the_clients(clients):
    mean = weighted_mean(
        {c: torch.tensor([v]) for c, (v, _) in clients.items()}, {c: w for c, (_, w) in clients.items()}
    )
    values = [value for value, _ in clients.values()]
    assert min(values) - 1e-3 <= mean.item() <= max(values) + 1e-3
    expected = sum(v * w for v, w in clients.values()) / sum(w for _, w in clients.values())
    torch.testing.assert_close(mean, torch.tensor([expected]), rtol=1e-5, atol=1e-4)


def test_who_replied_first_does_not_matter_to_the_bit():
    rng = torch.Generator().manual_seed(0)
    updates = [(client, torch.randn(50, generator=rng)) for client in (11, 5, 8, 2)]
    weights = {11: 3.0, 5: 0.1, 8: 7.7, 2: 1e-3}
    means = [weighted_mean(dict(order), weights) for order in itertools.permutations(updates)]
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_a_client_of_weight_zero_counts_for_nothing_and_one_alone_for_everything():
    trees = {0: torch.tensor([1 / 3]), 1: torch.tensor([9.0])}
    assert torch.equal(weighted_mean(trees, {0: 5, 1: 0}), trees[0])
    assert torch.equal(weighted_mean({1: trees[1]}, {1: 0.3}), trees[1])
