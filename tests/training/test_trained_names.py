"""Training some of a group's parameters while the others stay means the same in every backend."""

import pytest
import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import MessageError
from fedmoe.models.images import LeNet
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.corrections import Proximal
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd

BACKENDS = ["native", "batched", "sequential"]
SHAPE, CLASSES, COUNTS = (2, 16, 16), 3, (7, 1, 0, 12)
CLIENTS = range(len(COUNTS))


def make_network(backend="sequential"):
    network = Network(lambda: LeNet(SHAPE, CLASSES, (3, 4), (5,)), input_shape=SHAPE)
    if backend == "native":
        network.go_native()
    return network


ALL = frozenset(make_network().init(0))
OUTPUT = frozenset({"head.2.weight", "head.2.bias"})
PARTS = {
    "output layer": OUTPUT,
    "everything below it": ALL - OUTPUT,
    "one weight in the middle": frozenset({"head.0.weight"}),
    "biases": frozenset(name for name in ALL if name.endswith("bias")),
}


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *SHAPE, generator=generator)
    return examples(x, torch.randint(0, CLASSES, (count,), generator=generator))


def cohort(*path):
    network = make_network()
    return trees.stack([network.init(s, *path) for s in CLIENTS])


DATA = side_by_side([rows(count, seed) for seed, count in enumerate(COUNTS)])


def train(backend, names, *, optimizer=Sgd(0.1), schedule=Schedule(5, epochs=3), stops=False, **group):  # noqa: B008
    loss = ClassifierLoss(make_network(backend))
    groups = {"model": Group(cohort(), loss, DATA, optimizer, trained_names=names, **group)}
    stopping = EarlyStopping(loss, DATA, patience=1) if stops else None
    return fit(groups, schedule, Streams(0, "test", 1, tuple(CLIENTS)), backend, stopping=stopping)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, momentum=0.9), Adam(1e-2, epsilon=1e-2)])
def test_all_backends_agree_and_the_rest_stays_to_the_bit(part, optimizer):
    names, start = PARTS[part], cohort()
    pull = Proximal(cohort("anchor"), 0.5)  # it would move every weight
    fitted = {backend: train(backend, names, optimizer=optimizer, proximal=pull) for backend in BACKENDS}
    for one in fitted.values():
        for name, tensor in one.params["model"].items():
            assert torch.equal(tensor, start[name]) == (name not in names), name
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), one, fitted["sequential"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_is_that_of_the_whole_network(backend):
    fitted = train(backend, OUTPUT, schedule=Schedule(100))
    network, own = make_network(), {name: leaf[0].clone().requires_grad_() for name, leaf in cohort().items()}
    loss = F.cross_entropy(network(own, rows(COUNTS[0], 0).x), rows(COUNTS[0], 0).y)
    for name, slope in zip(OUTPUT, torch.autograd.grad(loss, [own[name] for name in OUTPUT]), strict=True):
        torch.testing.assert_close(fitted.params["model"][name][0], own[name].detach() - 0.1 * slope)


@pytest.mark.parametrize("backend", BACKENDS)
def test_to_name_every_parameter_is_to_name_none(backend):
    named, unnamed = train(backend, ALL), train(backend, None)
    assert all(map(torch.equal, trees.leaves(named), trees.leaves(unnamed)))


@pytest.mark.parametrize("part", PARTS)
def test_whole_epochs_are_native(part):
    with record_fallbacks() as reasons:
        train("native", PARTS[part])
    assert reasons == []


def test_early_stopping_goes_along():
    native, *others = (train(backend, OUTPUT, stops=True, optimizer=Sgd(2.0)) for backend in BACKENDS)
    for other in others:
        assert torch.equal(native.epochs_S, other.epochs_S)
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_name_that_is_not_there_is_an_error(backend):
    with pytest.raises(MessageError, match=r"no parameter is named 'head\.9'"):
        train(backend, frozenset({"head.9"}))
    with pytest.raises(MessageError, match=r"is empty"):
        train(backend, frozenset())
