import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

NETWORK = Network(lambda: nn.Linear(3, 2))


def rows(size, seed):
    rng = torch.Generator().manual_seed(seed)
    return examples(torch.randn(size, 3, generator=rng), torch.randint(0, 2, (size,), generator=rng))


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_the_mean_loss_is_over_a_clients_own_examples_and_nan_without_any(backend):
    params = trees.stack([NETWORK.init(seed) for seed in range(3)])
    clients = [rows(4, 0), rows(0, 1), rows(2, 2)]
    losses = LocalTrainer(LocalTraining(), backend).mean_loss(NETWORK, params, side_by_side(clients))
    for s in (0, 2):
        expected = F.cross_entropy(NETWORK(trees.pick(params, s), clients[s].x), clients[s].y)
        torch.testing.assert_close(losses[s], expected)
    assert losses[1].isnan()


def test_early_stopping_is_asked_for():
    """The validation labels contradict the training labels, so the start is best."""
    train = rows(8, 0)
    against = train._replace(y=1 - train.y)
    data = ClientData(side_by_side([train]), side_by_side([against]))
    start = trees.stack([NETWORK.init(0)])
    settings = LocalTraining(epochs=5, batch_size=8, learning_rate=1e-2, optimizer="sgd", patience=2)
    trainer = LocalTrainer(settings, "sequential")
    rng = Streams(0, "test", 0, (0,))
    stopped, trained = (trainer.train_classifier(NETWORK, start, data, rng, stop_early=flag) for flag in (True, False))
    assert torch.equal(stopped.params["model"]["weight"], start["weight"]) and stopped.epochs_S.tolist() == [2]
    assert not torch.equal(trained.params["model"]["weight"], start["weight"]) and trained.epochs_S.tolist() == [5]
