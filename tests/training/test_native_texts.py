"""Texts train in whole native epochs as step by step in PyTorch, and words that nobody uses keep every bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedmoe import trees
from fedmoe.algorithms.fedmix.objective import Objective
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.models.network import Network
from fedmoe.models.text import TextLSTM
from fedmoe.noise import NoiseKey
from fedmoe.private_steps import Mechanism, PrivateSteps
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss, MixtureLoss
from fedmoe.training.corrections import Proximal
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd

WORDS, USED, LENGTH, CLASSES = 40, 15, 7, 3  # no text has a word from 15 on
COUNTS = (7, 1, 0, 12)


def make_network(backend, outputs=CLASSES):
    network = Network(lambda: TextLSTM(WORDS, outputs, 5, 6), input_shape=(LENGTH,))
    if backend == "native":
        network.go_native()
    return network


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, USED, (count, LENGTH), generator=generator)
    x[torch.arange(LENGTH) >= torch.randint(0, LENGTH + 1, (count, 1), generator=generator)] = 0
    return examples(x, torch.randint(0, CLASSES, (count,), generator=generator))


DATA = side_by_side([rows(count, seed) for seed, count in enumerate(COUNTS)])
STREAMS = Streams(0, "test", 1, tuple(range(len(COUNTS))))


def fitted(backend, groups, frozen=None, rng=STREAMS):
    with record_fallbacks() as fallbacks:
        found = fit(groups, Schedule(5, epochs=3), rng, backend, frozen=frozen)
    assert not fallbacks
    return found


def train(backend, optimizer, network=None, **options):
    network = network or make_network(backend)
    start = trees.stack([network.init(s) for s in range(len(COUNTS))])
    group = Group(start, ClassifierLoss(network), DATA, optimizer, **options)
    return fitted(backend, {"model": group}).params["model"], start


def assert_same(one, other):
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), one, other)


def anchor():
    return trees.stack([make_network("sequential").init("anchor")] * len(COUNTS))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (Sgd(0.3), {}),
        (Sgd(0.3, momentum=0.9), {}),
        (Sgd(0.3, weight_decay=0.1), {}),
        (Adam(0.01, epsilon=1e-3), {}),
        (Adam(0.01, epsilon=1e-3, weight_decay=0.1), {}),
        (Adam(0.01, epsilon=1e-3, weight_decay=0.1, decoupled=True), {}),
        (Sgd(0.3), {"max_gradient_norm": 0.1}),
        (Adam(0.01, epsilon=1e-3), {"proximal": lambda: Proximal(anchor(), 0.5)}),
        (Adam(0.01, epsilon=1e-3), {"gradient_offset": anchor}),
        (Adam(0.01, epsilon=1e-3), {"trained_names": lambda: frozenset({"head.weight", "forwards.weight_hh_l0"})}),
    ],
)
def test_native_epochs_are_those_of_pytorch(optimizer, options):
    options = {name: make() if callable(make) else make for name, make in options.items()}
    (native, _), (sequential, _) = (train(backend, optimizer, **options) for backend in ("native", "sequential"))
    assert_same(native, sequential)


def test_adam_on_an_embedding_is_torch_s_dense_adam_row_by_row():
    """A word of an earlier batch has moments, and goes on moving without a gradient; one of no batch stays."""
    native, start = train("native", Adam(0.01, epsilon=1e-3))
    s, rng = 3, STREAMS.generators("batches")[3]
    module, params = TextLSTM(WORDS, CLASSES, 5, 6), {n: t[s].clone().requires_grad_() for n, t in start.items()}
    optimizer = torch.optim.Adam(params.values(), 0.01, eps=1e-3)
    for _ in range(3):
        for index in torch.randperm(COUNTS[s], generator=rng).split(5):
            optimizer.zero_grad()
            F.cross_entropy(functional_call(module, params, (DATA.x[s, index],)), DATA.y[s, index]).backward()
            optimizer.step()
    assert_same({name: tensor[s] for name, tensor in native.items()}, {n: t.detach() for n, t in params.items()})
    before, after = (tree["embedding.weight"][s] for tree in (start, native))
    used = torch.zeros(WORDS, dtype=torch.bool)
    used[DATA.x[s].unique()] = True
    used[0] = False  # padding is not trained
    assert torch.equal(before[~used], after[~used])
    assert (before[used] != after[used]).any(1).all()


def test_repetitions_and_company_change_no_bit():
    (first, _), (again, _) = (train("native", Adam(0.01)) for _ in range(2))
    assert all(map(torch.equal, trees.leaves(first), trees.leaves(again)))
    network = make_network("native")
    group = Group(trees.stack([network.init(3)]), ClassifierLoss(network), side_by_side([rows(12, 3)]), Adam(0.01))
    alone = fitted("native", {"model": group}, rng=Streams(0, "test", 1, (3,))).params["model"]
    assert all(torch.equal(first[name][3], alone[name][0]) for name in alone)


def test_a_frozen_embedding_is_a_constant():
    def frozen():
        module = TextLSTM(WORDS, CLASSES, 5, 6)
        module.embedding.weight.requires_grad_(False)
        return module

    networks = {backend: Network(frozen, input_shape=(LENGTH,)) for backend in ("native", "sequential")}
    networks["native"].go_native()
    (native, _), (sequential, _) = (train(backend, Adam(0.01, epsilon=1e-3), networks[backend]) for backend in networks)
    assert "embedding.weight" not in native
    assert_same(native, sequential)


def test_mixtures_of_two_experts_train_as_sequentially():
    trained = {}
    for backend in ("native", "sequential"):
        expert, gate = make_network(backend), make_network(backend, 1)
        parts = {"specialist": expert, "gate": gate, "general": expert}
        start = {
            name: trees.stack([network.init(s, name) for s in range(len(COUNTS))]) for name, network in parts.items()
        }
        loss = MixtureLoss(expert, gate, first="specialist", second="general")
        trained[backend] = fitted(backend, {"mixture": Group(start, loss, DATA, Sgd(0.2))}).params
    assert_same(trained["native"], trained["sequential"])


@pytest.mark.parametrize("backend", ["native", "sequential"])
def test_fedmix_trains_text_networks(backend):
    """On the sequential backend too: PyTorch has no rule for mapping an LSTM over experts."""
    network, num_experts = make_network(backend), 3
    generator = torch.Generator().manual_seed(0)
    size = len(COUNTS)
    parts = {
        "experts": trees.stack([trees.stack([network.init(s, h) for h in range(num_experts)]) for s in range(size)]),
        "posterior": torch.randn(size, CLASSES, num_experts, generator=generator),
        "gate": {
            "weight": torch.zeros(size, num_experts, network.num_features),
            "bias": torch.zeros(size, num_experts),
        },
    }
    frozen = {
        "posterior": torch.zeros(size, 0, num_experts),
        "expert_ids": torch.arange(num_experts).expand(size, -1).contiguous(),
        "in_use": torch.ones(size, num_experts, dtype=torch.bool),
        "shares": torch.full((size, CLASSES), 1 / CLASSES),
    }
    losses = Objective(FedMixConfig(num_experts=num_experts), network)
    groups = {"mixture": Group(parts, losses, DATA, Sgd(0.2))}
    trained = fitted(backend, groups, frozen).params["mixture"]
    if backend == "native":
        plain = copy.copy(losses)
        object.__setattr__(plain, "network", make_network("sequential"))
        expected = fitted("sequential", {"mixture": Group(parts, plain, DATA, Sgd(0.2))}, frozen)
        assert_same(trained, expected.params["mixture"])
    assert not torch.equal(trained["experts"]["head.bias"], parts["experts"]["head.bias"])


def test_clipped_gradients_of_single_texts_are_those_of_autograd():
    network, data = make_network("native"), side_by_side([rows(6, 0)])
    mechanism = Mechanism(noise_multiplier=0.0, sampling_rate=1.0, expected_batch_size=6.0, clip_norm=0.3)
    private = PrivateSteps(mechanism, {0: NoiseKey.of_seed(0, 0)}, {0: 0})
    start = trees.stack([network.init(7)])
    group = Group(start, ClassifierLoss(network), data, Sgd(1.0))
    rng = Streams(0, "train", 1, (0,), private_steps=private)
    moved = fit({"model": group}, Schedule(6, steps=1), rng, "native").params["model"]
    module, total = TextLSTM(WORDS, CLASSES, 5, 6), dict.fromkeys(start, 0.0)
    module.load_state_dict({name: tensor[0] for name, tensor in start.items()})
    for n in range(6):
        grads = torch.autograd.grad(
            F.cross_entropy(module(data.x[0, n : n + 1]), data.y[0, n : n + 1]), module.parameters()
        )
        scale = min(1.0, 0.3 / torch.stack([grad.norm() for grad in grads]).norm().item())
        for (name, _), grad in zip(module.named_parameters(), grads, strict=True):
            total[name] = total[name] + scale * grad / 6
    for name, tensor in total.items():
        torch.testing.assert_close(start[name][0] - moved[name][0], tensor, atol=2e-6, rtol=1e-4)
