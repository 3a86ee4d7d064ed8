"""Copies of a network with weights for the examples train alike in every backend."""

import pytest
import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import MessageError
from fedmoe.models.images import LeNet
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd
from fedmoe.training.weighted_copies import WeightedCopiesLoss
from smooth_residual import SmoothResidual

SHAPE, CLASSES, COPIES, COUNTS = (2, 16, 16), 3, 2, (7, 1, 0, 12)
CLIENTS = range(len(COUNTS))


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *SHAPE, generator=generator)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return examples(x, y, {"weight": torch.rand(count, COPIES, generator=generator)})


DATA = side_by_side([rows(count, seed) for seed, count in enumerate(COUNTS)])


def lenet():
    return LeNet(SHAPE, CLASSES, (3, 4), (5,))


def residual():
    return SmoothResidual(SHAPE, CLASSES)


def make_network(backend, make=lenet):
    network = Network(make, "expert", SHAPE)
    if backend == "native":
        network.go_native()
    return network


def start_of(network):
    return trees.stack([trees.stack([network.init(s, f"copy {m}") for m in range(COPIES)]) for s in CLIENTS])


def train(backend, optimizer, schedule=Schedule(5, epochs=3), data=DATA, make=lenet):  # noqa: B008
    network = make_network(backend, make)
    loss = WeightedCopiesLoss(network, "copies", "weight")
    groups = {"copies": Group(start_of(network), loss, data, optimizer)}
    return fit(groups, schedule, Streams(0, "test", 1, tuple(CLIENTS)), backend, {})


@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, 0.9), Adam(0.01)])
@pytest.mark.parametrize("backend", ["native", "batched"])
def test_backends_agree(backend, optimizer):
    got, expected = train(backend, optimizer), train("sequential", optimizer)
    torch.testing.assert_close(got.params, expected.params, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.loss_S, expected.loss_S, rtol=1e-5, atol=1e-6)


def test_copies_of_a_residual_network_train_natively_as_sequentially():
    native, sequential = (train(backend, Sgd(0.05), make=residual) for backend in ("native", "sequential"))
    torch.testing.assert_close(native.params, sequential.params, rtol=1e-4, atol=1e-5)


def test_the_kernels_take_whole_epochs():
    with record_fallbacks() as reasons:
        train("native", Sgd(0.1))
    assert not reasons


@pytest.mark.parametrize("backend", ["native", "sequential"])
def test_a_step_is_that_of_the_weighted_mean(backend):
    """One batch of all examples: w - rate * gradient of mean(weight * cross-entropy), copy by copy, in PyTorch."""
    network = make_network("sequential")
    stepped = train(backend, Sgd(0.1), Schedule(12, steps=1)).params["copies"]
    (x, y), weight = (DATA.x[3], DATA.y[3]), DATA.extra["weight"][3]
    for m in range(COPIES):
        start = {name: leaf.clone().requires_grad_() for name, leaf in network.init(3, f"copy {m}").items()}
        losses = F.cross_entropy(network(start, x), y, reduction="none")
        gradients = torch.autograd.grad((weight[:, m] * losses).mean(), list(start.values()))
        for (name, leaf), gradient in zip(start.items(), gradients, strict=True):
            torch.testing.assert_close(stepped[name][3, m], leaf.detach() - 0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_an_example_without_weight_changes_nothing():
    silent = DATA.extra["weight"].clone()
    silent[3, 5] = 0
    muted = DATA._replace(extra={"weight": silent})
    other = muted._replace(x=muted.x.clone())
    other.x[3, 5] += 1
    first, second = (train("native", Sgd(0.1), data=data).params for data in (muted, other))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(MessageError, match="weights"):
        train("native", Sgd(0.1), data=DATA._replace(extra={"weight": DATA.extra["weight"][:, :3]}))
