"""A proximal pull, a constant in the gradient and one in the logits mean the same in every backend."""

import pytest
import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import MessageError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.corrections import Proximal
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fallbacks import fallback_note, record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd

BACKENDS = ["native", "batched", "sequential"]
SHAPE, CLASSES, COUNTS = (4,), 3, (7, 1, 0, 12)
CLIENTS = range(len(COUNTS))
THREE_EPOCHS, PLAIN = Schedule(5, epochs=3), Sgd(0.1)


def make_network(backend="sequential"):
    network = Network(lambda: mlp(SHAPE, CLASSES, (5,)), input_shape=SHAPE)
    if backend == "native":
        network.go_native()
    return network


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *SHAPE, generator=generator)
    return examples(x, torch.randint(0, CLASSES, (count,), generator=generator))


def cohort(*path):
    network = make_network()
    return trees.stack([network.init(s, *path) for s in CLIENTS])


def offsets():
    generator = torch.Generator().manual_seed(5)
    return trees.tree_map(lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator), cohort())


LOGITS_SC = 2 * torch.randn(len(COUNTS), CLASSES, generator=torch.Generator().manual_seed(6))
CASES = {
    "proximal": {"proximal": Proximal(cohort("anchor"), 0.7)},
    "gradient offset": {"gradient_offset": offsets()},
    "logit offset": {"frozen": {"logit_offset": LOGITS_SC}},
    "all of them": {
        "proximal": Proximal(cohort("anchor"), 0.7),
        "gradient_offset": offsets(),
        "frozen": {"logit_offset": LOGITS_SC},
    },
}


def train(backend, *, frozen=None, schedule=THREE_EPOCHS, optimizer=PLAIN, stops=False, **group):
    network = make_network(backend)
    data = side_by_side([rows(count, seed) for seed, count in enumerate(COUNTS)])
    loss = ClassifierLoss(network)
    groups = {"model": Group(cohort(), loss, data, optimizer, **group)}
    stopping = EarlyStopping(loss, data, patience=1) if stops else None
    return fit(groups, schedule, Streams(0, "test", 1, tuple(CLIENTS)), backend, frozen, stopping)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, momentum=0.9), Adam(1e-2, epsilon=1e-2)])
def test_all_backends_agree_and_report_the_same_loss(case, optimizer):
    native, batched, sequential = (train(b, optimizer=optimizer, **CASES[case]) for b in BACKENDS)
    for other in (batched, sequential):
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, other)
    plain = train("native", optimizer=optimizer)
    for s in (0, 1, 3):
        assert not torch.allclose(native.params["model"]["1.weight"][s], plain.params["model"]["1.weight"][s])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_one_step_goes_down_the_gradient_of_the_formula(backend, case):
    """loss(w) + strength / 2 |w - anchor|^2 + <w, offset>, by autograd."""
    given, client, rate = CASES[case], 0, 0.1
    fitted = train(backend, optimizer=Sgd(rate), schedule=Schedule(100), **given)
    network, data = make_network(), rows(COUNTS[client], client)
    own = {name: leaf[client].clone().requires_grad_() for name, leaf in cohort().items()}
    logits = network(own, data.x) + (LOGITS_SC[client] if "frozen" in given else 0)
    data_loss = value = F.cross_entropy(logits, data.y)
    if "proximal" in given:
        anchor = trees.pick(given["proximal"].towards_S, client)
        value = value + 0.7 / 2 * sum((own[name] - anchor[name]).square().sum() for name in own)
    if "gradient_offset" in given:
        value = value + sum((own[name] * given["gradient_offset"][name][client]).sum() for name in own)
    for (name, leaf), slope in zip(own.items(), torch.autograd.grad(value, own.values()), strict=True):
        torch.testing.assert_close(fitted.params["model"][name][client], leaf.detach() - rate * slope)
    torch.testing.assert_close(fitted.loss_S[client], data_loss.detach())  # without the pull and the constant


@pytest.mark.parametrize("case", CASES)
def test_they_are_taken_in_whole_native_epochs(case):
    with record_fallbacks() as reasons:
        train("native", **CASES[case])
    assert reasons == []


@pytest.mark.parametrize("case", CASES)
def test_early_stopping_goes_along(case):
    native, batched, sequential = (train(b, stops=True, optimizer=Sgd(0.5), **CASES[case]) for b in BACKENDS)
    for other in (batched, sequential):
        assert torch.equal(native.epochs_S, other.epochs_S)
        trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), native, other)


def test_an_endless_pull_keeps_the_weights_at_their_anchor():
    """w -> w - rate * strength * (w - anchor) with rate * strength = 1, from the anchor on: the loss hardly counts."""
    fitted = train("native", proximal=Proximal(cohort(), 1e4), optimizer=Sgd(1e-4))
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=1e-3, rtol=0), fitted.params["model"], cohort())


@pytest.mark.parametrize("backend", BACKENDS)
def test_references_of_another_structure_are_refused(backend):
    narrower = {name: leaf[:, :1] if name == "1.bias" else leaf for name, leaf in cohort().items()}
    missing = {name: leaf for name, leaf in cohort().items() if name != "3.bias"}
    wide = {name: leaf.double() for name, leaf in cohort().items()}
    with pytest.raises(MessageError, match=r"the weights of the proximal term .* differ in '1\.bias': shape \(1,\)"):
        train(backend, proximal=Proximal(narrower, 1.0))
    with pytest.raises(MessageError, match=r"the gradient offset .* differ in '3\.bias': shape None"):
        train(backend, gradient_offset=missing)
    with pytest.raises(MessageError, match=r"float64"):
        train(backend, gradient_offset=wide)


def test_a_fit_that_falls_back_says_so_once_to_every_open_recorder():
    def weight_decay(trainable, _frozen, _batch, _real):
        return sum(leaf.square().sum() for leaf in trainable["model"].values())

    with record_fallbacks() as outer:
        with record_fallbacks() as inner:
            train("native", batch_term=weight_decay)
            train("native", batch_term=weight_decay)
            train("batched", batch_term=weight_decay)
        train("native", batch_term=weight_decay)
    train("native", batch_term=weight_decay)
    assert inner == outer == ["group 'model' has a batch_term"]
    assert "fall back to step by step" in fallback_note(outer[0])
