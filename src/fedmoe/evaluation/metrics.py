"""How good a model is on some examples."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import Examples
from fedmoe.training.inference import CHUNK


class Score(NamedTuple):
    """Every score names the client, the model and the data that it was measured on."""

    client: int
    unseen: bool  # the client never trained with the others
    model: str  # "before" or "after" personalisation
    data: str  # "own", "global", or "pooled": a sample of all clients' validation examples
    accuracy: float
    loss: float  # mean negative log-likelihood
    examples: int


def score_examples(predict: Callable[[Tensor], Tensor], rows: Examples) -> tuple[float, float]:
    """(accuracy, mean negative log-likelihood) of log-probabilities."""
    with torch.no_grad():
        log_probs_NC = torch.cat([predict(x) for x in rows.x.split(CHUNK)])
    correct = (log_probs_NC.argmax(1) == rows.y).double().mean()
    likelihood = log_probs_NC.gather(1, rows.y[:, None]).double().mean()
    return float(correct), -float(likelihood)
