import pytest
import torch
import torch.nn.functional as F

from fedmoe.models.task import CLASSIFICATION, Regression

GENERATOR = torch.Generator().manual_seed(0)
PREDICTED, WANTED = (torch.randn(5, 3, generator=GENERATOR) for _ in range(2))


@pytest.mark.parametrize(
    ("loss", "reference"),
    [("squared", F.mse_loss), ("absolute", F.l1_loss), ("huber", lambda *pair: F.huber_loss(*pair, delta=0.4))],
)
def test_losses_are_those_of_torch_as_a_mean_over_the_targets(loss, reference):
    losses_B = Regression(loss, 0.4).losses(PREDICTED, WANTED)
    assert losses_B.shape == (5,)
    torch.testing.assert_close(losses_B.mean(), reference(PREDICTED, WANTED))


def test_one_target_may_be_given_with_or_without_an_axis_of_its_own_and_for_a_cohort():
    one = Regression()
    expected = (PREDICTED[:, 0] - WANTED[:, 0]).square()
    torch.testing.assert_close(one.losses(PREDICTED[:, :1], WANTED[:, 0]), expected)
    torch.testing.assert_close(one.losses(PREDICTED[:, :1], WANTED[:, :1]), expected)
    torch.testing.assert_close(one.losses(PREDICTED[None, :, :1], WANTED[None, :, 0]), expected[None])


def test_classes_of_a_cohort_have_the_losses_of_its_clients():
    log_probs_SBC, y_SB = (
        CLASSIFICATION.prediction(torch.stack([PREDICTED, WANTED])),
        torch.tensor([[0, 1, 2, 1, 0]] * 2),
    )
    each = [CLASSIFICATION.losses(one, y) for one, y in zip(log_probs_SBC, y_SB, strict=True)]
    torch.testing.assert_close(CLASSIFICATION.losses(log_probs_SBC, y_SB), torch.stack(each))


def test_a_mixture_of_numbers_is_the_mixture_of_means():
    gate_B1 = torch.tensor([[-30.0], [30.0], [0.0], [0.0], [0.0]])
    mixed = Regression().mix(gate_B1, PREDICTED, WANTED)
    torch.testing.assert_close(mixed[0], WANTED[0])
    torch.testing.assert_close(mixed[1], PREDICTED[1])
    torch.testing.assert_close(mixed[2:], (PREDICTED[2:] + WANTED[2:]) / 2)
    weights_BK = torch.tensor([[0.25, 0.75]]).expand(5, 2)
    expected = 0.25 * PREDICTED + 0.75 * WANTED
    torch.testing.assert_close(Regression().mixture(weights_BK.log(), torch.stack([PREDICTED, WANTED])), expected)
