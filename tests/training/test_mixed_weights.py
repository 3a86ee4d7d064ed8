"""Training a model within a mixture of weights means the same in every backend."""

import pytest
import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import MessageError
from fedmoe.models.images import LeNet
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.mixed_weights import MixedWeightsLoss, mixed
from fedmoe.training.optimizers import Adam, Sgd
from smooth_residual import SmoothResidual

BACKENDS = ["native", "batched", "sequential"]
SHAPE, CLASSES, COUNTS = (2, 16, 16), 3, (7, 1, 0, 12)
CLIENTS = range(len(COUNTS))
ALPHA_S = torch.tensor([0.3, 0.0, 0.5, 1.0])


def lenet():
    return LeNet(SHAPE, CLASSES, (3, 4), (5,))


def residual():
    return SmoothResidual(SHAPE, CLASSES, width=18, shortcut="convolve")


def make_network(backend="sequential", *, frozen_output=False, make=lenet):
    torch.manual_seed(3)
    module = make()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen_output and name.startswith("head.2")))
    network = Network(module if frozen_output else make, "expert", SHAPE)
    if backend == "native":
        network.go_native()
    return network


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *SHAPE, generator=generator)
    return examples(x, torch.randint(0, CLASSES, (count,), generator=generator))


DATA = side_by_side([rows(count, seed) for seed, count in enumerate(COUNTS)])


def start_of(network):
    """A constant shift makes the two models differ also where a module starts every copy alike."""
    own = trees.stack([network.init(s, "own") for s in CLIENTS])
    model = trees.stack([network.init(s, "model") for s in CLIENTS])
    return {"own": own, "model": trees.tree_map(lambda leaf: leaf + 0.05, model)}


def train(backend, *, with_model=True, optimizer=Sgd(0.1), schedule=Schedule(5, epochs=3), stops=False, alpha=ALPHA_S,  # noqa: B008
          frozen_output=False, make=lenet):  # fmt: skip
    network = make_network(backend, frozen_output=frozen_output, make=make)
    start, loss = start_of(network), MixedWeightsLoss(network, with_model)
    names = None if with_model else frozenset(f"own/{name}" for name in start["own"])
    stopping = EarlyStopping(loss, DATA, patience=1) if stops else None
    groups = {"mixture": Group(start, loss, DATA, optimizer, trained_names=names)}
    return fit(groups, schedule, Streams(0, "test", 1, tuple(CLIENTS)), backend, {"alpha": alpha}, stopping)


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("frozen_output", [True, False])
@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, momentum=0.9), Adam(1e-2, epsilon=1e-2)])
def test_all_backends_agree(with_model, frozen_output, optimizer):
    native, *others = (
        train(backend, with_model=with_model, optimizer=optimizer, frozen_output=frozen_output) for backend in BACKENDS
    )
    for other in others:
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, other)
    start = start_of(make_network(frozen_output=frozen_output))
    end = native.params["mixture"]
    assert torch.equal(end["model"]["head.0.bias"], start["model"]["head.0.bias"]) != with_model
    moved = [not torch.equal(end["own"]["head.0.bias"][s], start["own"]["head.0.bias"][s]) for s in CLIENTS]
    assert moved == [True, False, False, True]  # alpha = 0 moves nothing; the third has no examples


def test_residual_networks_too():
    native, sequential = (train(backend, make=residual) for backend in ("native", "sequential"))
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_goes_down_the_gradient_of_the_formula(backend):
    fitted, network = train(backend, schedule=Schedule(100)), make_network()
    own, model = (trees.pick(start_of(network)[part], 0) for part in ("own", "model"))
    v, w = ({name: leaf.clone().requires_grad_() for name, leaf in part.items()} for part in (own, model))
    x, y = rows(COUNTS[0], 0).x, rows(COUNTS[0], 0).y
    of_mixture = F.cross_entropy(network(mixed(ALPHA_S[0], v, model), x), y)
    of_model = F.cross_entropy(network(w, x), y)
    for part, value, leaves in (("own", of_mixture, v), ("model", of_model, w)):
        for (name, leaf), slope in zip(leaves.items(), torch.autograd.grad(value, leaves.values()), strict=True):
            torch.testing.assert_close(fitted.params["mixture"][part][name][0], leaf.detach() - 0.1 * slope)
    torch.testing.assert_close(fitted.loss_S[0], (of_mixture + of_model).detach())


@pytest.mark.parametrize("with_model", [True, False])
def test_whole_epochs_are_native(with_model):
    with record_fallbacks() as reasons:
        train("native", with_model=with_model)
    assert reasons == []


def test_early_stopping_goes_along():
    native, *others = (train(backend, with_model=False, stops=True, optimizer=Sgd(2.0)) for backend in BACKENDS)
    for other in others:
        assert torch.equal(native.epochs_S, other.epochs_S)
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, other)


def test_alpha_of_other_clients_is_an_error():
    with pytest.raises(MessageError, match=r"alpha is float32 of shape \(2,\)"):
        train("native", alpha=ALPHA_S[:2])
