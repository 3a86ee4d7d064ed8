import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedmoe.models.mixture import log_mix, negative_log_likelihood


def log_probabilities(seed, scale=1.0):
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.log_softmax(scale * scores, dim=1)


def gate(value):
    return torch.full((6, 1), float(value), dtype=torch.float64)


@given(score=st.floats(-30, 30), seed=st.integers(0, 10**6))
def test_it_is_the_log_of_the_mixed_probabilities(score, seed):
    """Eq. 3 of Listo Zec et al. (2021): h f_s + (1 - h) f_g, on probabilities."""
    first, second = log_probabilities(seed), log_probabilities(seed + 1)
    h = torch.sigmoid(gate(score))
    torch.testing.assert_close(log_mix(gate(score), first, second), torch.log(h * first.exp() + (1 - h) * second.exp()))


def test_it_is_not_the_mix_of_log_probabilities():
    first, second = log_probabilities(0), log_probabilities(1)
    assert not torch.allclose(log_mix(gate(0), first, second), (first + second) / 2, atol=1e-2)


def test_a_gate_that_is_sure_leaves_one_expert():
    first, second = log_probabilities(0), log_probabilities(1)
    torch.testing.assert_close(log_mix(gate(100), first, second), first)
    torch.testing.assert_close(log_mix(gate(-100), first, second), second)


def test_it_stays_finite_with_gradients_for_scores_of_a_hundred():
    """Probabilities of e^-200 are zero in float32, their logs are not."""
    experts = (100 * torch.tensor([[1.0, -1.0]])).requires_grad_()
    for score in (-100.0, 100.0):
        gate_score = torch.tensor([[score]], requires_grad=True)
        mixed = log_mix(gate_score, F.log_softmax(experts, 1), F.log_softmax(-experts, 1))
        assert mixed.isfinite().all()
        grads = torch.autograd.grad(negative_log_likelihood(mixed, torch.tensor([1])).sum(), (gate_score, experts))
        assert all(grad.isfinite().all() for grad in grads)


@given(score=st.floats(-100, 100), scale=st.floats(0.1, 50), seed=st.integers(0, 10**6))
def test_rows_sum_to_one(score, scale, seed):
    mixed = log_mix(gate(score), log_probabilities(seed, scale), log_probabilities(seed + 1, scale))
    torch.testing.assert_close(mixed.exp().sum(1), torch.ones(6, dtype=torch.float64))


def test_one_loss_per_example():
    log_probs = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    torch.testing.assert_close(
        negative_log_likelihood(log_probs, torch.tensor([1, 0])), -torch.log(torch.tensor([0.75, 0.5]))
    )
