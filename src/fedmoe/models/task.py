"""What a federation predicts: one of several classes, or one or several numbers.

Algorithms speak of predictions, losses and mixtures; a task says what these are. Shape suffixes: B examples, K experts,
C classes or numbers. The leading axes of scores may be more than B: a cohort has (S, B, C).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.models.expert_mixture import log_mixture
from fedmoe.models.mixture import log_mix, negative_log_likelihood

RegressionLoss = Literal["squared", "absolute", "huber"]
REGRESSION_LOSSES: tuple[str, ...] = get_args(RegressionLoss)


@dataclass(frozen=True)
class Classification:
    """A prediction is log-probabilities (B, C), a target the number of a class (B,)."""

    def prediction(self, scores_BC: Tensor) -> Tensor:
        return F.log_softmax(scores_BC, dim=-1)

    def losses(self, prediction_BC: Tensor, y_B: Tensor) -> Tensor:
        """One negative log-likelihood per example."""
        if y_B.dim() == 1:
            return negative_log_likelihood(prediction_BC, y_B)
        return -prediction_BC.gather(-1, y_B.unsqueeze(-1)).squeeze(-1)

    def mix(self, gate_score_B1: Tensor, first_BC: Tensor, second_BC: Tensor) -> Tensor:
        return log_mix(gate_score_B1, first_BC, second_BC)

    def mixture(self, log_weights_BK: Tensor, predictions_KBC: Tensor) -> Tensor:
        return log_mixture(log_weights_BK, predictions_KBC)

    def answer(self, prediction_BC: Tensor) -> Tensor:
        """What a personal model gives its user: probabilities."""
        return prediction_BC.exp()


@dataclass(frozen=True)
class Regression:
    """A prediction is one number per target (B, C); targets are (B,) or (B, C). Losses are means over the targets.

    An expert is read as the mean of its prediction, so a mixture of experts predicts the mixture of means.
    """

    loss: RegressionLoss = "squared"
    huber_delta: float = 1.0  # where the Huber loss turns from squares to absolute values

    def prediction(self, scores_BC: Tensor) -> Tensor:
        return scores_BC

    def losses(self, prediction_BC: Tensor, y_B: Tensor) -> Tensor:
        """
        >>> Regression("absolute").losses(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 1.0]]))
        tensor([2.])
        """
        y_BC = y_B.reshape(prediction_BC.shape)
        if self.loss == "huber":
            return F.huber_loss(prediction_BC, y_BC, reduction="none", delta=self.huber_delta).mean(-1)
        error_BC = prediction_BC - y_BC
        return (error_BC.square() if self.loss == "squared" else error_BC.abs()).mean(-1)

    def mix(self, gate_score_B1: Tensor, first_BC: Tensor, second_BC: Tensor) -> Tensor:
        """h first + (1 - h) second with h = sigmoid(gate score)."""
        return torch.lerp(second_BC, first_BC, torch.sigmoid(gate_score_B1))

    def mixture(self, log_weights_BK: Tensor, predictions_KBC: Tensor) -> Tensor:
        return torch.einsum("bk,kbc->bc", log_weights_BK.exp(), predictions_KBC)

    def answer(self, prediction_BC: Tensor) -> Tensor:
        return prediction_BC


Task = Classification | Regression
CLASSIFICATION = Classification()  # the default nearly everywhere
