import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmoe.streams import Streams, derive_seed, numpy_stream, torch_stream


def draws(rng, purpose="batches"):
    return [torch.rand(4, generator=generator).tolist() for generator in rng.generators(purpose)]


def test_streams_differ_by_seed_scope_purpose_round_and_client():
    here = Streams(0, "train", 1, (5,))
    others = [
        draws(here),
        draws(here, "noise"),
        draws(here._replace(seed=1)),
        draws(here._replace(scope="personalize")),
        draws(here._replace(round=2)),
        draws(here._replace(clients=(6,))),
    ]
    assert len({str(one) for one in others}) == len(others)
    assert draws(here) == draws(Streams(0, "train", 1, (5,)))


def test_a_client_draws_the_same_whoever_else_is_in_the_cohort():
    together, alone = Streams(0, "train", 1, (3, 5, 8)), Streams(0, "train", 1, (5,))
    assert draws(together)[1] == draws(alone)[0] and together.seeds("gate")[1] == alone.seeds("gate")[0]


def test_rounds_and_clients_are_not_confused():
    """(round 1, client 11) is another path than (round 11, client 1)."""
    assert Streams(0, "t", 1, (11,)).seeds("x") != Streams(0, "t", 11, (1,)).seeds("x")


@given(st.lists(st.integers(0, 10**9) | st.text(max_size=5), min_size=1, max_size=4))
def test_a_seed_fits_both_libraries(path):
    seed = derive_seed(*path)
    assert 0 <= seed < 2**63 and seed == derive_seed(*path)
    assert torch_stream(*path).initial_seed() == seed
    assert numpy_stream(*path).random() == np.random.default_rng(seed).random()


def test_seeds_of_neighbours_have_nothing_in_common():
    seeds = [derive_seed(0, "batches", 1, client) for client in range(2000)]
    assert len(set(seeds)) == 2000
    ones = np.array([[seed >> bit & 1 for bit in range(63)] for seed in seeds]).mean(0)
    assert (abs(ones - 0.5) < 0.06).all()


def test_no_global_generator_is_touched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 (it is what must not change)
    torch.rand(2, generator=torch_stream(1)), numpy_stream(1).random(2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_seeds_of_a_cohort_are_those_of_each_client_alone():
    streams = Streams(3, "round:train", 7, (0, 12, 5))
    assert streams.seeds("batches") == [derive_seed(3, "round:train", "batches", 7, client) for client in (0, 12, 5)]
