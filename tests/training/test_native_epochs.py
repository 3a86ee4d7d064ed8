"""A client's whole epoch in one call is the same training as step by step in PyTorch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import DataError
from fedmoe.models.images import LeNet, mlp
from fedmoe.models.network import Network
from fedmoe.models.resnet import ResNet
from fedmoe.streams import Streams
from fedmoe.training.augment import AUGMENTATIONS
from fedmoe.training.batches import shuffled
from fedmoe.training.classifier import ClassifierLoss, MixtureLoss
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.kernel_spec import KernelSpec
from fedmoe.training.native_epochs import ends_of_batches, kernel_spec_of
from fedmoe.training.native_epochs import shuffled as native_shuffled
from fedmoe.training.optimizers import Adam, Sgd
from smooth_residual import SmoothResidual

# Adam's epsilon is well above the rounding of gradients throughout: else a gradient that is zero but for rounding moves
# a weight as far as any other, and no two orders of summation agree.
SHAPE = (2, 16, 16)
COUNTS = (7, 1, 0, 12)


# A chain, and residual networks with each kind of shortcut.
MODULES = {
    "lenet": lambda outputs: LeNet(SHAPE, outputs, (3, 4), (5,)),
    "resnet": lambda outputs: ResNet(SHAPE, outputs, (1, 1), (16, 32), 4, "pad"),
    "padded": lambda outputs: SmoothResidual(SHAPE, outputs),
    "convolved": lambda outputs: SmoothResidual(SHAPE, outputs, width=18, shortcut="convolve"),
}


def make_network(*, native, outputs=3, module="lenet"):
    network = Network(lambda: MODULES[module](outputs), input_shape=SHAPE)
    if native:
        network.go_native()
    return network


def rows(count, seed, shape=SHAPE, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    return examples(x, torch.randint(0, classes, (count,), generator=generator))


def train(backend, optimizer, schedule, stopping_rows=None, counts=COUNTS, module="lenet", **group):
    network = make_network(native=backend == "native", module=module)
    data = side_by_side([rows(count, seed) for seed, count in enumerate(counts)])
    start = trees.stack([network.init(seed) for seed in range(len(counts))])
    loss = ClassifierLoss(network)
    stopping = EarlyStopping(loss, side_by_side(stopping_rows), patience=1) if stopping_rows else None
    groups = {"model": Group(start, loss, data, optimizer, **group)}
    return fit(groups, schedule, Streams(0, "test", 1, tuple(range(len(counts)))), backend, stopping=stopping)


@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, momentum=0.9), Adam(1e-3, epsilon=1e-3)])
@pytest.mark.parametrize("schedule", [Schedule(5, epochs=3), Schedule(5, steps=4)])
def test_native_training_equals_sequential_training_for_ragged_and_empty_clients(optimizer, schedule):
    native, sequential = train("native", optimizer, schedule), train("sequential", optimizer, schedule)
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)
    assert native.epochs_S.tolist() == sequential.epochs_S.tolist()
    assert native.loss_S[2] == 0 and torch.equal(native.params["model"]["head.0.bias"][2], make_bias(2))


@pytest.mark.parametrize("module", ["padded", "convolved"])
@pytest.mark.parametrize("optimizer", [Sgd(0.05, momentum=0.9), Adam(1e-3, epsilon=1e-3)])
def test_residual_networks_train_natively_as_sequentially(module, optimizer):
    with record_fallbacks() as reasons:
        native = train("native", optimizer, Schedule(5, epochs=2), module=module)
    assert not reasons
    sequential = train("sequential", optimizer, Schedule(5, epochs=2), module=module)
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)


def make_bias(client):
    return make_network(native=False).init(client)["head.0.bias"]


def test_early_stopping_sees_the_same_epochs_and_keeps_the_same_copies():
    against = [rows(count, seed)._replace(y=2 - rows(count, seed).y) for seed, count in enumerate(COUNTS)]
    stopped = [train(backend, Sgd(0.1), Schedule(5, epochs=6), against) for backend in ("native", "sequential")]
    assert stopped[0].epochs_S.tolist() == stopped[1].epochs_S.tolist()
    assert 0 < min(stopped[0].epochs_S[[0, 1, 3]].tolist()) < 6
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), *(s.params for s in stopped))


@pytest.mark.parametrize("module", MODULES)
def test_repetitions_and_company_change_no_bit(module):
    everyone = train("native", Adam(1e-3, epsilon=1e-3), Schedule(5, epochs=2), module=module)
    again = train("native", Adam(1e-3, epsilon=1e-3), Schedule(5, epochs=2), module=module)
    alone = train("native", Adam(1e-3, epsilon=1e-3), Schedule(5, epochs=2), counts=COUNTS[:1], module=module)
    assert all(map(torch.equal, trees.leaves(everyone), trees.leaves(again)))
    first = trees.tree_map(lambda leaf: leaf[:1], everyone)
    assert all(map(torch.equal, trees.leaves(first), trees.leaves(alone)))


def test_embedded_words_train_natively_as_sequentially():
    trained = {}
    for backend in ("native", "sequential"):
        network = Network(lambda: nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, 3)), input_shape=(4,))
        if backend == "native":
            network.go_native()
        parts = [
            examples(torch.randint(0, 9, (n, 4), generator=torch.Generator().manual_seed(n)), rows(n, n).y)
            for n in (7, 3)
        ]
        start = trees.stack([network.init(s) for s in range(2)])
        groups = {"model": Group(start, ClassifierLoss(network), side_by_side(parts), Adam(0.01, epsilon=1e-3))}
        trained[backend] = fit(groups, Schedule(3, epochs=2), Streams(0, "test", 1, (0, 1)), backend)
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), *trained.values())


# Mixtures of two experts


def train_mixture(backend, *, second_is_trained, optimizer, module="lenet"):
    native = backend == "native"
    expert, gate = make_network(native=native, module=module), make_network(native=native, outputs=1)
    parts = [rows(count, seed) for seed, count in enumerate(COUNTS)]
    predictions = [
        F.log_softmax(torch.randn(len(p.y), 3, generator=torch.Generator().manual_seed(9)), -1) for p in parts
    ]
    data = side_by_side(
        [p._replace(extra={"second": prediction}) for p, prediction in zip(parts, predictions, strict=True)]
    )
    clients = range(len(COUNTS))
    start = {
        "first": trees.stack([expert.init(s) for s in clients]),
        "gate": trees.stack([gate.init(s) for s in clients]),
    }
    if second_is_trained:
        start["second"] = trees.stack([expert.init("second", s) for s in clients])
    groups = {"mixture": Group(start, MixtureLoss(expert, gate, "first", "second"), data, optimizer)}
    return fit(groups, Schedule(5, epochs=3), Streams(0, "test", 1, tuple(clients)), backend)


@pytest.mark.parametrize("second_is_trained", [True, False])
@pytest.mark.parametrize("optimizer", [Sgd(0.1), Adam(1e-3, epsilon=1e-3)])
def test_a_mixture_trains_natively_as_sequentially(second_is_trained, optimizer):
    native, sequential = (
        train_mixture(backend, second_is_trained=second_is_trained, optimizer=optimizer)
        for backend in ("native", "sequential")
    )
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)


@pytest.mark.parametrize("second_is_trained", [True, False])
def test_a_mixture_of_residual_networks_trains_natively_as_sequentially(second_is_trained):
    native, sequential = (
        train_mixture(backend, second_is_trained=second_is_trained, optimizer=Sgd(0.05), module="padded")
        for backend in ("native", "sequential")
    )
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)


def test_a_mixture_with_a_gate_that_is_sure_stays_finite_where_its_expert_can_be_right():
    """log h underflows for float: only sums of logs survive."""
    network, gate = make_network(native=True), make_network(native=True, outputs=1)
    start = {"first": trees.stack([network.init(0)]), "gate": trees.stack([gate.init(0)])}
    start["gate"]["head.2.bias"] = torch.full((1, 1), -500.0)
    data = side_by_side([rows(4, 0)._replace(extra={"second": torch.full((4, 3), -torch.inf)})])
    groups = {"mixture": Group(start, MixtureLoss(network, gate, "first", "second"), data, Sgd(1e-6))}
    fitted = fit(groups, Schedule(4), Streams(0, "test", 1, (0,)), "native")
    assert 400 < fitted.loss_S[0] < 600
    assert all(leaf.isfinite().all() for leaf in trees.leaves(fitted.params))


@pytest.mark.parametrize(("count", "batch_size", "steps"), [(7, 3, 3), (7, 3, 8), (6, 3, 1), (1, 5, 4)])
def test_batches_are_those_of_the_other_ways(count, batch_size, steps):
    order = native_shuffled(torch.Generator().manual_seed(3), count, batch_size, steps)
    ends = ends_of_batches(count, batch_size, steps)
    batches = itertools.islice(shuffled(torch.Generator().manual_seed(3), count, batch_size), steps)
    begin = [0, *ends[:-1].tolist()]
    assert [order[a:b].tolist() for a, b in zip(begin, ends.tolist(), strict=True)] == [b.tolist() for b in batches]


def reason_of(group, more=()):
    return kernel_spec_of({"model": group, **dict(more)}, {})


def test_whatever_is_more_than_one_networks_cross_entropy_goes_step_by_step_and_says_why():
    loss = ClassifierLoss(make_network(native=True))
    group = Group({}, loss, side_by_side([rows(2, 0)]), Sgd(0.1))
    assert isinstance(reason_of(group), KernelSpec)
    assert reason_of(group._replace(batch_term=lambda *_: torch.zeros(()))) == "group 'model' has a batch_term"
    assert reason_of(group._replace(noise=lambda *_: {})) == "group 'model' has a noise"
    assert reason_of(group._replace(augmentation=AUGMENTATIONS["crop_flip"])) == "group 'model' has an augmentation"
    assert "weight_decay, which the kernels do not know" in reason_of(group._replace(loss=weight_decay))
    assert "'model', 'other' are trained together" in reason_of(group, more={"other": group}.items())
    assert "does not run natively" in reason_of(group._replace(loss=ClassifierLoss(make_network(native=False))))


def test_a_loss_with_more_to_it_trains_natively_step_by_step():
    def with_term(backend):
        return train(backend, Sgd(0.1), Schedule(5, epochs=2), batch_term=weight_decay)

    native, sequential = with_term("native"), with_term("sequential")
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, sequential)


def weight_decay(trainable, _frozen, _batch, _real):
    return 0.1 * sum(weight.square().sum() for weight in trainable["model"].values())


def test_a_label_that_the_model_has_no_output_for_is_refused_before_any_kernel_reads_it():
    network = Network(lambda: mlp((4,), 2, ()), input_shape=(4,))
    network.go_native()
    data = side_by_side([rows(6, 0, (4,), classes=5)])
    groups = {"model": Group(trees.stack([network.init(0)]), ClassifierLoss(network), data, Sgd(0.1))}
    with pytest.raises(DataError, match=r"labels reach from \d to 4.*2 outputs"):
        fit(groups, Schedule(2), Streams(0, "test", 1, (0,)), "native")


def test_so_is_one_that_a_frozen_expert_of_a_mixture_has_no_answer_for():
    expert, gate = make_network(native=True), make_network(native=True, outputs=1)
    data = side_by_side([rows(6, 0, classes=5)._replace(extra={"second": torch.zeros(6, 3)})])
    start = {"first": trees.stack([expert.init(0)]), "gate": trees.stack([gate.init(0)])}
    groups = {"mixture": Group(start, MixtureLoss(expert, gate, "first", "second"), data, Sgd(0.1))}
    with pytest.raises(DataError, match=r"labels reach from \d to 4.*3 outputs"):
        fit(groups, Schedule(2), Streams(0, "test", 1, (0,)), "native")


@pytest.mark.parametrize("module", MODULES)
def test_native_features_are_the_input_of_the_output_layer(module):
    native, plain = make_network(native=True, module=module), make_network(native=False, module=module)
    params, x = plain.init(0), rows(4, 0).x
    for one, other in zip(native.with_features(params, x), plain.with_features(params, x), strict=True):
        torch.testing.assert_close(one, other)


def test_a_single_layer_has_its_input_for_features():
    network = Network(lambda: nn.Linear(4, 2), input_shape=(4,))
    network.go_native()
    x = torch.randn(3, 4)
    scores, features = network.with_features(network.init(0), x)
    assert torch.equal(features, x)
    torch.testing.assert_close(scores, network(network.init(0), x))


def test_a_network_says_what_keeps_it_from_the_kernels():
    assert make_network(native=False).obstacle is None
    assert "shape of its inputs" in Network(lambda: nn.Linear(4, 2)).obstacle
    odd = Network(lambda: nn.Sequential(nn.Linear(4, 2), nn.GELU()), input_shape=(4,))
    assert "GELU" in odd.obstacle and not odd.is_chain
