import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.aggregation.expert_observation import (
    ExpertSubset,
    Observation,
    entropy,
    gradient_divergence,
    observe_experts,
)


def pair_by_pair(moves, shares):
    """Eq. 16 as printed, for each named parameter."""
    total = 0.0
    for name in moves[0]:
        for move_i, p_i in zip(moves, shares, strict=True):
            for move_j, p_j in zip(moves, shares, strict=True):
                a, b = move_i[name].flatten().double(), move_j[name].flatten().double()
                total += float(p_i * p_j) * 0.5 * (1 - float(a @ b) / float(a.norm() * b.norm()))
    return total


@settings(deadline=None)
@given(clients=st.integers(1, 6), seed=st.integers(0, 2**31), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_the_divergence_is_eq_16(clients, seed, scale):
    rng = torch.Generator().manual_seed(seed)
    moves = [
        {"weight": scale * torch.randn(3, 4, generator=rng), "bias": torch.randn(2, generator=rng)}
        for _ in range(clients)
    ]
    shares = torch.rand(clients, generator=rng) + 0.01
    shares /= shares.sum()
    assert gradient_divergence(moves, shares) == pytest.approx(pair_by_pair(moves, shares), abs=1e-5)


def move(*values):
    return {"w": torch.tensor(values)}


@pytest.mark.parametrize(
    ("moves", "shares", "expected"),
    [
        ([move(1.0, 0.0), move(5.0, 0.0)], [0.5, 0.5], 0.0),  # the same way, at any length
        ([move(1.0, 0.0), move(0.0, 3.0)], [0.5, 0.5], 0.25),
        ([move(1.0, 0.0), move(-1.0, 0.0)], [0.5, 0.5], 0.5),
        ([move(1.0, 0.0), move(-1.0, 0.0)], [0.9, 0.1], 0.18),
        ([move(1.0, 0.0), move(-1.0, 0.0)], [1.0, 0.0], 0.0),
        ([move(1.0, 0.0), move(1.0, 0.0), move(0.0, 0.0)], [0.25, 0.25, 0.5], 0.0),  # no move, no direction
        ([move(0.0, 0.0)], [1.0], 0.0),
        ([move(1.0, 0.0)], [3.0], 0.0),  # shares need not add up to one
    ],
)
def test_divergences_that_a_person_can_compute(moves, shares, expected):
    assert gradient_divergence(moves, torch.tensor(shares)) == pytest.approx(expected, abs=1e-6)


BEFORE = {"w": torch.zeros(3, 2)}
SENT = {
    7: ExpertSubset({"w": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}, torch.tensor([0, 1])),
    2: ExpertSubset({"w": torch.tensor([[0.0, 1.0]])}, torch.tensor([0])),
}
MASS = {7: torch.tensor([6.0, 2.0, 0.0]), 2: torch.tensor([2.0, 0.0, 0.0])}


def test_a_rounds_experts_are_described_by_load_entropy_and_divergence():
    seen = observe_experts(BEFORE, SENT, MASS)
    assert seen.load_K.tolist() == pytest.approx([0.8, 0.2, 0.0])
    two_experts = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert seen.usage_entropy == pytest.approx(two_experts / 2)  # the other client uses one
    orthogonal = 0.5 * (1 - (0.75**2 + 0.25**2))  # p(s|z=0) is 6/8 and 2/8
    assert seen.divergence_K[:2].tolist() == pytest.approx([orthogonal, 0.0]) and seen.divergence_K[2].isnan()


def test_an_expert_that_a_client_sent_without_using_it_has_no_say():
    mass = {**MASS, 7: torch.tensor([0.0, 2.0, 0.0])}
    assert observe_experts(BEFORE, SENT, mass).divergence_K[0] == pytest.approx(0.0)


def test_a_round_without_any_work_has_no_load():
    seen = observe_experts(BEFORE, SENT, {client: torch.zeros(3) for client in SENT})
    assert seen.load_K.tolist() == [0.0] * 3 and seen.usage_entropy == 0.0 and seen.divergence_K.isnan().all()


def test_an_event_is_plain_json_with_null_for_what_is_not_known():
    shares = torch.tensor([[1 / 3, 2 / 3]])
    seen = Observation(torch.tensor([0.25, 0.75]), 0.5, torch.tensor([0.1, math.nan]), shares, "angle")
    event = json.loads(json.dumps(seen.as_event(), allow_nan=False))
    assert event == {
        "load": [0.25, 0.75],
        "usage_entropy": 0.5,
        "divergence": [0.1, None],
        "assignment": {"of": "angle", "shares": [[0.3333, 0.6667]]},
    }
    assert seen._replace(assignment_RK=None).as_event()["assignment"] is None


def test_entropy_is_zero_for_one_expert_and_log_k_for_all_alike():
    found = entropy(torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))
    assert found.tolist() == pytest.approx([0.0, math.log(3)])
