import pytest
import torch
from torch import nn

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.augment import AUGMENTATIONS, crop_flip, draw_crop_flip
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.local import LocalTrainer
from fedmoe.training.optimizers import Sgd
from fedmoe.training.settings import LocalTraining

NETWORK = Network(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 3, 2)))


def images(size, seed):
    rng = torch.Generator().manual_seed(seed)
    return examples(torch.randn(size, 2, 6, 5, generator=rng), torch.randint(0, 2, (size,), generator=rng))


def train(clients, backend="sequential", sizes=(5, 3, 7), **plan):
    rows = side_by_side([images(sizes[client], client) for client in clients])
    start = trees.stack([NETWORK.init(0)] * len(clients))
    settings = LocalTraining(epochs=2, batch_size=3, learning_rate=0.1, optimizer="sgd", **plan)
    rng = Streams(0, "test", 1, tuple(clients))
    data = ClientData(rows, rows)
    return LocalTrainer(settings, backend).train_classifier(NETWORK, start, data, rng, stop_early=False).params["model"]


def test_a_crop_is_a_window_of_the_padded_image_and_a_flip_mirrors_it():
    x = images(4, 0).x
    moved = crop_flip(x, torch.tensor([[4, 4, 0], [4, 4, 1], [3, 4, 0], [4, 6, 1]]))
    assert torch.equal(moved[0], x[0])
    assert torch.equal(moved[1], x[1].flip(-1))
    assert torch.equal(moved[2, :, 1:], x[2, :, :-1]) and not moved[2, :, 0].any()  # one down: a row of zeros on top
    assert torch.equal(moved[3], torch.nn.functional.pad(x[3], [0, 2])[..., 2:].flip(-1))


def test_every_window_is_equally_likely():
    draws = draw_crop_flip(torch.Generator().manual_seed(0), 20_000)
    for column, values in ((0, 9), (1, 9), (2, 2)):
        shares = torch.bincount(draws[:, column], minlength=values) / 20_000
        assert len(shares) == values and (shares - 1 / values).abs().max() < 0.01


def test_training_images_are_changed_anew_in_each_epoch():
    seen = []
    group = Group(
        {"w": torch.zeros(1)},
        lambda trainable, _frozen, batch: seen.append(batch.x) or trainable["model"]["w"].expand(len(batch)),
        side_by_side([images(1, 0)]),
        Sgd(1.0),
        augmentation=AUGMENTATIONS["crop_flip"],
    )
    fit({"model": group}, Schedule(1, epochs=3), Streams(0, "test", 1, (0,)), "sequential")
    first, second, third = seen
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_groups_on_the_same_data_see_the_same_images(backend):
    """Each group's weight moves by the mean of what it saw: equal images, equal weights."""

    def loss(name):
        return lambda trainable, _frozen, batch: trainable[name]["w"] * batch.x[:, 0, 0, 0]

    data = side_by_side([images(5, 0), images(4, 1)])
    groups = {
        name: Group({"w": torch.zeros(2)}, loss(name), data, Sgd(1.0), augmentation=AUGMENTATIONS["crop_flip"])
        for name in ("experts", "gate")
    }
    fitted = fit(groups, Schedule(2, epochs=3), Streams(0, "test", 1, (0, 1)), backend).params
    assert fitted["experts"]["w"].all() and torch.equal(fitted["experts"]["w"], fitted["gate"]["w"])


def test_batched_equals_sequential_and_the_cohort_changes_nothing():
    together, sequential = train([0, 1, 2], "batched", augment="crop_flip"), train([0, 1, 2], augment="crop_flip")
    for name, tensor in sequential.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(train([2], augment="crop_flip")[name][0], tensor[2])
        assert not torch.allclose(train([0, 1, 2])[name], tensor, atol=1e-3)


def test_only_training_images_are_changed():
    """What stops training is measured on validation images as they are: a learning rate of nearly 0 moves nothing."""
    data = ClientData(side_by_side([images(6, 0)]), side_by_side([images(6, 1)]))
    start = trees.stack([NETWORK.init(0)])
    plan = LocalTraining(epochs=4, batch_size=3, learning_rate=1e-30, optimizer="sgd", patience=2, augment="crop_flip")
    rng = Streams(0, "test", 0, (0,))
    fitted = LocalTrainer(plan, "sequential").train_classifier(NETWORK, start, data, rng, stop_early=True)
    assert fitted.epochs_S.tolist() == [2]  # the same loss at each look: never better, so patience ends it
