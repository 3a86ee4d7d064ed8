"""What a curious server reads of a client's label distribution p(y|s) from one honest update.

Reisser et al. (2021), Appendix C. Two attacks: the step of the output bias (eq. 14-15), and FedMix's q(z|s), which the
server may solve for p(y|s) since it knows phi. A third, ours, reads the rows of the output layer. None needs more than
what the algorithm sends anyway.
Shape suffixes: C classes, K experts.
"""

import numpy as np
import torch
from torch import Tensor

from fedmoe.training.settings import LocalTraining

SUM_WEIGHT = 1e3  # how firmly least squares holds the sum of shares to 1
UNIFORM_PULL = 1e-4  # what many distributions explain alike is read as the one nearest to uniform


def step_length(plan: LocalTraining, num_examples: float) -> float | None:
    """How far a constant gradient of 1 moves a weight in one client's training; None where that has no fixed length.

    The server knows the plan, and the number of examples is in the update. Adam's steps do not scale with gradients.
    """
    if plan.optimizer != "sgd" or num_examples < 1:
        return None
    steps = plan.steps or plan.epochs * -(-int(num_examples) // plan.batch_size)
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = plan.momentum * velocity + 1
        moved += velocity
    return plan.learning_rate * moved


def shares_from_bias(change_C: Tensor, length: float) -> Tensor:
    """p(y) = (b_s - b) / alpha + 1 / C, put back on the simplex.

    Eq. 15 with the sign of a descent: the printed one is the wrong way round. Its 1 / C stands for the mean prediction
    of a model that knows nothing yet; and for one step over all data. So it is exact at a neutral start, less so later.
    """
    change_C = change_C.double()
    return project_to_simplex(change_C / length + 1 / len(change_C))


def normalised_shares(change_C: Tensor) -> Tensor:
    """The change shifted to start at zero and scaled to sum to one: reads any optimizer and any number of steps.

    The paper reads Figure 10 off the normalised difference without saying how a difference of both signs is normalised;
    here the class that lost most is taken to be absent.
    """
    change_C = change_C.double()
    above_C = change_C - change_C.min()
    total = above_C.sum()
    return above_C / total if total > 0 else torch.full_like(above_C, 1 / len(above_C))


def shares_from_rows(change_CF: Tensor) -> Tensor:
    """The lengths of the changes of the output layer's rows, scaled to sum to one.

    Each example moves the row of its label most. Unlike the bias, whose change an adjusted loss keeps near zero, rows
    of labels that a client has still follow the features of its examples.
    """
    lengths_C = change_CF.double().norm(dim=1)
    total = lengths_C.sum()
    return lengths_C / total if total > 0 else torch.full_like(lengths_C, 1 / len(lengths_C))


def shares_from_usage(posterior_CK: Tensor, usage_K: Tensor) -> Tensor:
    """p(y) on the simplex that best explains q(z|s) = sum_y p(y) q(z|y), by least squares.

    With fewer experts than classes many do; of these the one nearest to uniform is returned.
    """
    from scipy.optimize import nnls  # here, because its import takes most of a second

    num_classes = len(posterior_CK)
    system = np.concatenate(
        [
            posterior_CK.double().softmax(1).T.numpy(),
            UNIFORM_PULL * np.eye(num_classes),
            np.full((1, num_classes), SUM_WEIGHT),
        ]
    )
    uniform = np.full(num_classes, UNIFORM_PULL / num_classes)
    shares_C = torch.from_numpy(nnls(system, np.concatenate([usage_K.double().numpy(), uniform, [SUM_WEIGHT]]))[0])
    return shares_C / shares_C.sum()


def project_to_simplex(values_C: Tensor) -> Tensor:
    """The distribution nearest to `values_C`: all are lowered alike, and what would be negative is zero.

    >>> project_to_simplex(torch.tensor([0.9, 0.4, -0.5]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    ordered = values_C.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(values_C) + 1)
    threshold = excess[(ordered > excess).nonzero()[-1, 0]]
    return (values_C - threshold).clamp_min(0)


def total_variation(first_C: Tensor, second_C: Tensor) -> float:
    """Half the summed difference of two distributions: 0 equal, 1 nothing in common."""
    return float((first_C.double() - second_C.double()).abs().sum() / 2)
