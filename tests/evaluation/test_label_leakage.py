import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.evaluation.label_leakage import (
    normalised_shares,
    project_to_simplex,
    shares_from_bias,
    shares_from_usage,
    step_length,
    total_variation,
)
from fedmoe.training.settings import LocalTraining

SHARES = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)


def bias_step(counts, rate):
    """One step of a neutral model's bias over all data: b_s - b."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    bias = torch.zeros(len(counts), requires_grad=True)
    F.cross_entropy(bias.expand(len(y), -1), y).backward()
    return -rate * bias.grad


def test_one_full_step_from_a_neutral_model_tells_the_label_distribution_exactly():
    """Eq. 15, and its sign: with the printed one the most frequent class would come out as the rarest."""
    read = shares_from_bias(bias_step([5, 3, 2, 0], 0.05), 0.05)
    torch.testing.assert_close(read, SHARES, atol=1e-6, rtol=0)


def test_normalising_needs_no_rate_and_is_exact_where_a_class_is_absent():
    read = normalised_shares(bias_step([5, 3, 2, 0], 123.0))
    torch.testing.assert_close(read, SHARES, atol=1e-6, rtol=0)


def test_a_bias_that_did_not_move_tells_nothing():
    assert normalised_shares(torch.zeros(4)).tolist() == [0.25] * 4
    assert shares_from_bias(torch.zeros(4), 0.1).tolist() == [0.25] * 4


class TestStepLength:
    def test_it_counts_the_steps_of_all_epochs(self):
        plan = LocalTraining(epochs=3, batch_size=10, learning_rate=0.5, optimizer="sgd")
        assert step_length(plan, 21) == pytest.approx(0.5 * 3 * 3)
        assert step_length(LocalTraining(steps=4, learning_rate=0.5, optimizer="sgd"), 21) == pytest.approx(2.0)

    def test_momentum_lengthens_it(self):
        plan = LocalTraining(steps=5, learning_rate=0.1, optimizer="sgd", momentum=0.9)
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for _ in range(5):
            weight.grad = -torch.ones(1)
            optimizer.step()
        assert step_length(plan, 10) == pytest.approx(weight.item())

    def test_adam_has_none(self):
        assert step_length(LocalTraining(optimizer="adam"), 10) is None


class TestSolvingForShares:
    posterior = torch.tensor([[4.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 2.0, 0], [0, 1.0, 0, 5.0]])

    def usage(self, posterior, shares):
        return (shares[:, None] * posterior.double().softmax(1)).sum(0).float()

    def test_as_many_experts_as_classes_tell_everything(self):
        read = shares_from_usage(self.posterior, self.usage(self.posterior, SHARES))
        torch.testing.assert_close(read, SHARES, atol=1e-4, rtol=0)

    def test_fewer_experts_tell_what_they_can_tell_apart(self):
        """Two experts, classes 0 and 1 against 2 and 3: sums of pairs are known, the rest is guessed alike."""
        posterior = torch.tensor([[9.0, -9.0], [9.0, -9.0], [-9.0, 9.0], [-9.0, 9.0]])
        read = shares_from_usage(posterior, self.usage(posterior, SHARES))
        torch.testing.assert_close(read, torch.tensor([0.4, 0.4, 0.1, 0.1]).double(), atol=1e-4, rtol=0)

    def test_experts_that_are_all_alike_tell_nothing(self):
        read = shares_from_usage(torch.zeros(4, 3), torch.full((3,), 1 / 3))
        torch.testing.assert_close(read, torch.full((4,), 0.25).double(), atol=1e-6, rtol=0)

    def test_a_usage_that_nothing_explains_still_gives_a_distribution(self):
        read = shares_from_usage(self.posterior, torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert (read >= 0).all() and read.sum() == pytest.approx(1) and read.argmax() == 0


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_the_projection_is_a_distribution_that_none_other_is_nearer_than(values):
    point = torch.tensor(values, dtype=torch.float64)
    nearest = project_to_simplex(point)
    assert (nearest >= 0).all() and nearest.sum() == pytest.approx(1)
    rng = torch.Generator().manual_seed(0)
    others = torch.rand(200, len(values), generator=rng, dtype=torch.float64).pow(3)
    others = torch.cat([others / others.sum(1, keepdim=True), torch.eye(len(values), dtype=torch.float64)])
    assert (others - point).norm(dim=1).min() >= (nearest - point).norm() - 1e-9


def test_total_variation_by_hand():
    assert total_variation(SHARES, torch.tensor([0.2, 0.3, 0.2, 0.3])) == pytest.approx(0.3)
    assert total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
