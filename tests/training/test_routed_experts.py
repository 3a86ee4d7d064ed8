"""Experts and router in whole native epochs are what PyTorch makes of the same loss; nothing is read out of bounds."""

import pytest
import torch

from fedmoe import trees
from fedmoe.core_types import Examples
from fedmoe.errors import MessageError
from fedmoe.models.images import LeNet
from fedmoe.models.network import Network
from fedmoe.models.router import router_network
from fedmoe.streams import Streams
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.local import LocalTrainer
from fedmoe.training.routed_experts import EMBEDDING, RoutedLoss, train_routed
from fedmoe.training.settings import LocalTraining
from smooth_residual import SmoothResidual

SHAPE, CLASSES, FEATURES, EXPERTS = (3, 16, 16), 7, 13, 5
SETTINGS = LocalTraining(epochs=2, batch_size=5, learning_rate=0.05, optimizer="sgd", momentum=0.9)


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, *SHAPE, generator=generator)
    y = torch.randint(0, CLASSES, (2, 12), generator=generator)
    return Examples(x, y, torch.tensor([12, 7]), {EMBEDDING: torch.randn(2, 12, FEATURES, generator=generator)})


def lenet():
    return LeNet(SHAPE, CLASSES, (3, 5), (11,))


def residual():
    return SmoothResidual(SHAPE, CLASSES)


def trained(backend, ids=((4, 1, 2), (0, 3, 4)), hidden=9, make=lenet, over="all"):
    expert = Network(make, "expert", SHAPE)
    router = router_network(FEATURES, EXPERTS, hidden)
    if backend == "native":
        if expert.obstacle:
            pytest.skip(expert.obstacle)
        expert.go_native()
        router.go_native()
    experts = [trees.stack([expert.init(s, h) for h in range(3)]) for s in range(2)]
    routers = trees.stack([router.init(s) for s in range(2)])
    loss, rng = RoutedLoss(expert, router, 0.3, over), Streams(0, "routed", 1, (0, 1))
    with record_fallbacks() as reasons:
        trainer = LocalTrainer(SETTINGS, backend)
        fitted = train_routed(loss, trainer, trees.stack(experts), torch.tensor(ids), routers, rows(), rng)
    assert reasons == []
    return fitted


@pytest.mark.parametrize("over", ["all", "sent"])
@pytest.mark.parametrize(("hidden", "make"), [(1, lenet), (9, lenet), (64, lenet), (9, residual)])
def test_whole_native_epochs_are_the_steps_of_pytorch(hidden, make, over):
    native, plain = (trained(backend, hidden=hidden, make=make, over=over) for backend in ("native", "sequential"))
    torch.testing.assert_close(native.loss_S, plain.loss_S, atol=1e-5, rtol=1e-5)
    for name, tensor in trees.to_named(plain.params).items():
        torch.testing.assert_close(trees.to_named(native.params)[name], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("ids", [((5, 1, 2), (0, 3, 4)), ((-1, 1, 2), (0, 3, 4))])
def test_experts_that_do_not_exist_are_refused_before_the_kernels_read_them(ids):
    with pytest.raises(MessageError, match="expert_ids reach from"):
        trained("native", ids)
