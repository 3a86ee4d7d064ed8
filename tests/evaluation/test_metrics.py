import math

import pytest
import torch

from fedmoe.clients.federation import examples
from fedmoe.evaluation.metrics import score_examples
from fedmoe.training.inference import CHUNK

PROBS = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]])


def test_accuracy_and_mean_negative_log_likelihood_by_hand():
    rows = examples(torch.arange(4), torch.tensor([0, 0, 0, 1]))
    accuracy, loss, *_ = score_examples(lambda x: PROBS[x].log(), rows)
    assert accuracy == 0.75
    assert loss == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(0.9)) / 4, abs=1e-6)


def test_long_sets_are_scored_in_pieces_and_every_row_counts_once():
    size = 2 * CHUNK + 1
    seen = []

    def predict(x):
        seen.append(len(x))
        return PROBS[x].log()

    x = torch.zeros(size, dtype=torch.int64)
    y = torch.zeros(size, dtype=torch.int64)
    y[-1] = 1
    accuracy, *_ = score_examples(predict, examples(x, y))
    assert seen == [CHUNK, CHUNK, 1] and accuracy == pytest.approx((size - 1) / size)
