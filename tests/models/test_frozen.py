"""Parameters with requires_grad=False are constants: read by every backend, trained and sent by none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from builders import tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedmix.objective import Objective
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.clients.per_example_cache import with_cached
from fedmoe.errors import ConfigError, MessageError
from fedmoe.models.images import LeNet, mlp
from fedmoe.models.layers import layers_of
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd

BACKENDS = ["native", "batched", "sequential"]
CLASSES, COUNTS = 3, (7, 1, 0, 12)
IMAGES, VECTORS, WORDS = (2, 16, 16), (6,), (4,)


def freeze(module, *prefixes):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return module


# What is pretrained lies below, in the middle, above, or is everything but the biases.
MODELS = {
    "convolutions": (IMAGES, lambda: freeze(LeNet(IMAGES, CLASSES, (3, 4), (5,)), "features")),
    "all but the output": (IMAGES, lambda: freeze(LeNet(IMAGES, CLASSES, (3, 4), (5,)), "features", "head.0")),
    "first dense layer": (VECTORS, lambda: freeze(mlp(VECTORS, CLASSES, (5, 4)), "1.")),
    "middle": (VECTORS, lambda: freeze(mlp(VECTORS, CLASSES, (5, 4)), "3.")),
    "output": (VECTORS, lambda: freeze(mlp(VECTORS, CLASSES, (5, 4)), "5.")),
    "weights": (VECTORS, lambda: freeze(mlp(VECTORS, CLASSES, (5,)), "1.weight", "3.weight")),
    "second convolution's weight": (IMAGES, lambda: freeze(LeNet(IMAGES, CLASSES, (3, 4), (5,)), "features.3.weight")),
    "embedding": (WORDS, lambda: freeze(nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, CLASSES)), "0.")),
}
PLAIN = [name for name, (shape, _) in MODELS.items() if shape != WORDS]


def make_network(name, backend="sequential"):
    shape, factory = MODELS[name]
    torch.manual_seed(3)
    network = Network(factory(), "expert", shape)
    if backend == "native":
        network.go_native()
    return network


def rows(shape, count, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, 9, (count, *shape), generator=generator)
    x = draw if shape == WORDS else torch.randn(count, *shape, generator=generator)
    return examples(x, torch.randint(0, CLASSES, (count,), generator=generator))


def train(name, backend, optimizer):
    network = make_network(name, backend)
    data = side_by_side([rows(MODELS[name][0], count, seed) for seed, count in enumerate(COUNTS)])
    start = trees.stack([network.init(0)] * len(COUNTS))
    groups = {"model": Group(start, ClassifierLoss(network), data, optimizer)}
    with record_fallbacks() as reasons:
        fitted = fit(groups, Schedule(5, epochs=3), Streams(0, "test", 1, (0, 1, 2, 3)), backend)
    assert reasons == []
    return network, fitted


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [Sgd(0.1), Adam(1e-2, epsilon=1e-2)])
def test_every_backend_trains_the_rest_alike(name, optimizer):
    before = make_network(name)
    native, other = (train(name, backend, optimizer) for backend in ("native", "sequential"))
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native[1], other[1])
    assert native[1].params["model"].keys() == before.init(0).keys()
    for leaf, start in zip(native[1].params["model"].values(), before.init(0).values(), strict=True):
        assert not torch.equal(leaf[0], start) and torch.equal(leaf[2], start)  # client 2 has no examples
    for network, _ in (native, other):
        assert all(torch.equal(network.frozen[key], before.frozen[key]) for key in before.frozen)


@pytest.mark.parametrize("name", PLAIN)
def test_the_batched_backend_too(name):
    batched, sequential = (train(name, backend, Sgd(0.1))[1] for backend in ("batched", "sequential"))
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), batched, sequential)


@pytest.mark.parametrize("name", MODELS)
def test_one_step_is_that_of_plain_pytorch_which_leaves_them_alone(name):
    shape, factory = MODELS[name]
    torch.manual_seed(3)
    module, data = factory(), rows(shape, 5, 0)
    network = make_network(name, "native")
    assert {n for n, p in module.named_parameters() if p.requires_grad} == network.init(0).keys()
    assert {n for n, p in module.named_parameters() if not p.requires_grad} == network.frozen.keys()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    F.cross_entropy(module(data.x), data.y).backward()
    optimizer.step()
    group = Group(trees.stack([network.init(0)]), ClassifierLoss(network), side_by_side([data]), Sgd(0.1))
    fitted = fit({"model": group}, Schedule(5), Streams(0, "test", 1, (0,)), "native").params["model"]
    for key, parameter in module.named_parameters():
        expected = fitted[key][0] if key in fitted else network.frozen[key]
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_step_by_step_gradients_of_the_kernels_are_those_of_pytorch(name):
    """Also by the input, for which the backward pass goes through all layers."""
    x = rows(MODELS[name][0], 4, 0).x
    inputs = [x.requires_grad_()] if x.is_floating_point() else []
    results = []
    for backend in ("native", "sequential"):
        network = make_network(name, backend)
        own = {key: leaf.requires_grad_() for key, leaf in network.init(0).items()}
        scores = network(own, x)
        for wanted in ([*own.values()], [*own.values(), *inputs]):
            results.append(torch.autograd.grad(scores.square().sum(), wanted, retain_graph=True))
    for one, other in ((results[0], results[2]), (results[1], results[3])):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_features_are_those_of_the_module(name):
    x = rows(MODELS[name][0], 4, 0).x
    native, plain = make_network(name, "native"), make_network(name)
    for one, other in zip(native.with_features(native.init(0), x), plain.with_features(plain.init(0), x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["convolutions", "all but the output", "middle", "output"])
def test_fedmix_trains_the_rest_of_its_experts(name):
    results = []
    for backend in ("native", "sequential"):
        network, count = make_network(name, backend), 2
        experts = [trees.tree_map(lambda leaf, k=k: leaf * (1 + k), network.init(0)) for k in range(count)]
        generator = torch.Generator().manual_seed(1)
        gate = torch.randn(1, count, network.num_features, generator=generator)
        parts = {
            "experts": trees.stack([trees.stack(experts)]),
            "posterior": torch.randn(1, CLASSES, count, generator=generator),
            "gate": {"weight": gate, "bias": torch.zeros(1, count)},
        }
        frozen = {
            "expert_ids": torch.arange(count)[None],
            "in_use": torch.ones(1, count, dtype=torch.bool),
            "shares": torch.full((1, CLASSES), 1 / CLASSES),
        }
        losses = Objective(FedMixConfig(num_experts=count), network)
        groups = {"mixture": Group(parts, losses, side_by_side([rows(MODELS[name][0], 9, 0)]), Sgd(0.2))}
        with record_fallbacks() as reasons:
            results.append(fit(groups, Schedule(4, epochs=2), Streams(0, "t", 1, (0,)), backend, frozen=frozen))
        assert reasons == []
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), *results)


def test_a_factory_draws_what_is_trained_and_keeps_the_constants_of_its_first_module():
    network = Network(MODELS["middle"][1], "expert", VECTORS)
    one, other = network.init(0), network.init(1)
    assert one.keys() == other.keys() and not any(torch.equal(one[key], other[key]) for key in one)
    again = Network(MODELS["middle"][1], "expert", VECTORS)
    assert all(torch.equal(network.frozen[key], again.frozen[key]) for key in network.frozen)


def test_frozen_weights_that_somebody_sends_all_the_same_are_refused():
    network = make_network("middle", "native")
    for weights in ({**network.init(0), **network.frozen}, dict(list(network.init(0).items())[1:])):
        with pytest.raises(MessageError, match="they are of two models"):
            network(weights, torch.zeros(1, *VECTORS))


def test_layers_are_those_with_something_to_train():
    assert [layer.name for layer in layers_of(make_network("convolutions"))] == ["head.0", "head.2"]
    weights = layers_of(make_network("weights"))
    assert [(layer.name, layer.weights) for layer in weights] == [("1", ("1.bias",)), ("3", ("3.bias",))]


def test_a_frozen_output_bias_cannot_be_personal():
    assert make_network("weights").output_bias_name == "3.bias"
    with pytest.raises(ConfigError, match=r"'5\.bias', the output bias of the expert, is frozen"):
        _ = make_network("output").output_bias_name


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="all parameters of the expert are frozen"):
        Network(nn.Linear(2, 2).requires_grad_(False), "expert")


def test_a_network_without_frozen_parameters_has_no_constants():
    network = Network(lambda: mlp(VECTORS, CLASSES, (5,)), "expert", VECTORS)
    assert network.frozen == {} and network.frozen_digest == ""


def test_the_digest_of_the_constants_follows_their_content_alone():
    one, same = make_network("middle"), make_network("middle")
    assert one.frozen_digest == same.frozen_digest != ""
    module = MODELS["middle"][1]()
    torch.manual_seed(3)
    other = MODELS["middle"][1]()
    with torch.no_grad():
        other[5].weight.add_(1)  # trained
    assert Network(other).frozen_digest == one.frozen_digest
    with torch.no_grad():
        other[3].weight[0, 0] += 1e-6
    assert Network(other).frozen_digest != one.frozen_digest != Network(module).frozen_digest


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_algorithm_sends_or_keeps_them(name, backend):
    setup = tiny_setup(backend)
    expert = Network(lambda: freeze(mlp(setup.expert.input_shape, CLASSES, (5, 4)), "1."), "expert", (4,))
    if backend == "native":
        expert.go_native()
    entry, clients = CATALOG[name], [0, 3]
    algorithm = entry.factory(entry.config(), setup._replace(expert=expert))
    federation = with_cached(tiny_federation(), algorithm.once_of_examples)
    server, data = algorithm.init_server(0), federation.data(clients, opted_in_only=True)
    rng, exchange = Streams(0, "test", 1, tuple(clients)), (*algorithm.round, *algorithm.delivery)[0]
    sent = exchange.broadcast(server, 0, [])
    state = algorithm.init_client(sent, 0, 0)
    received_S, state_S = (trees.stack([tree, tree]) for tree in (sent, state))
    trees_of = [server, sent, state, *exchange.local_update(received_S, state_S, data, rng)[:2]]
    if algorithm.personalize:
        personal = algorithm.init_personal(sent, state, 0, 0) if algorithm.init_personal else None
        personal_S = None if personal is None else trees.stack([personal, personal])
        delivered = algorithm.delivery[-1].broadcast(server, 0, [trees.pick(trees_of[-1], 0)])
        delivered_S = trees.stack([delivered, delivered])
        trees_of += [delivered, algorithm.personalize(delivered_S, state_S, personal_S, data, rng)]
    found = [
        key for tree in trees_of for one in (tree if isinstance(tree, list) else [tree]) for key in trees.to_named(one)
    ]
    assert set(expert.frozen) == {"1.weight", "1.bias"}
    assert (found or not algorithm.round) and not [
        key for key in found if key.split("/")[-1] in expert.frozen and "gate" not in key
    ]
