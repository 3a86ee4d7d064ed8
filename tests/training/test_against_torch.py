"""Every backend trains a client as a plain loop with `torch.optim` and `clip_grad_norm_` would."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.batches import shuffled
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.corrections import clip_by_norm
from fedmoe.training.fallbacks import record_fallbacks
from fedmoe.training.fit import fit
from fedmoe.training.group import Schedule
from fedmoe.training.local import LocalTrainer
from fedmoe.training.rates import RateSchedule
from fedmoe.training.settings import LocalTraining

BACKENDS = ["native", "batched", "sequential"]
COUNTS = (7, 1, 0, 12)
RNG = Streams(0, "test", 2, tuple(range(len(COUNTS))))
TRAINED = frozenset({"3.weight", "3.bias"})

SGD = {"optimizer": "sgd", "learning_rate": 0.2}
CASES = {
    "sgd": SGD | {"weight_decay": 0.3},
    "momentum": SGD | {"momentum": 0.9, "weight_decay": 0.3},
    "adam": {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.3},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.3},
    "clipped": SGD | {"max_gradient_norm": 0.2},
    "clipped sometimes": SGD | {"max_gradient_norm": 0.8},
    "all of it": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.3, "max_gradient_norm": 0.2},
}
OVER_STEPS = RateSchedule("cosine", warm_up=2)
OVER_ROUNDS = RateSchedule("step", every=1, factor=0.5)
SCHEDULES = {
    "steps": {"rate_over_steps": OVER_STEPS},
    "both": {"rate_over_steps": OVER_STEPS, "rate_over_rounds": OVER_ROUNDS},
}


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return examples(x, torch.randint(0, 3, (count,), generator=generator))


DATA = [rows(count, seed) for seed, count in enumerate(COUNTS)]


def make_network(backend="sequential"):
    network = Network(lambda: mlp((4,), 3, (5,)), input_shape=(4,))
    if backend == "native":
        network.go_native()
    return network


def ours(backend, settings, trained_names=None):
    network = make_network(backend)
    trainer = LocalTrainer(settings, backend)
    start = trees.stack([network.init(s) for s in range(len(COUNTS))])
    group = trainer.group(start, ClassifierLoss(network), side_by_side(DATA), trained_names=trained_names)
    with record_fallbacks() as fallbacks:
        fitted = trainer.fit({"model": group}, RNG)
    assert not fallbacks  # what the kernels know, they do in whole epochs
    return fitted.params["model"]


def theirs(settings, s, trained_names=None):
    """A loop over batches of one client, as anybody writes it."""
    params = {name: tensor.clone() for name, tensor in make_network().init(s).items()}
    trained = [params[name].requires_grad_() for name in params if trained_names is None or name in trained_names]
    made = {
        "sgd": lambda: torch.optim.SGD(trained, settings.learning_rate, settings.momentum, weight_decay=decay),
        "adam": lambda: torch.optim.Adam(trained, settings.learning_rate, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(trained, settings.learning_rate, weight_decay=decay),
    }
    decay, x, y = settings.weight_decay, DATA[s].x, DATA[s].y
    optimizer, module = made[settings.optimizer](), mlp((4,), 3, (5,))
    batches = shuffled(RNG.generators("batches")[s], len(y), settings.batch_size)
    steps = settings.epochs * -(-len(y) // settings.batch_size)
    for step, index in enumerate(itertools.islice(batches, steps)):
        of_round = OVER_ROUNDS.share(RNG.round - 1, 1) if settings.rate_over_rounds else 1
        of_step = OVER_STEPS.share(step, steps) if settings.rate_over_steps else 1
        optimizer.param_groups[0]["lr"] = settings.learning_rate * of_round * of_step
        optimizer.zero_grad()
        F.cross_entropy(functional_call(module, params, (x[index],)), y[index]).backward()
        if settings.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, settings.max_gradient_norm)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in params.items()}


@pytest.mark.parametrize("trained_names", [None, TRAINED], ids=["all", "the head"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_train_as_with_torch_optim(backend, case, trained_names):
    settings = LocalTraining(epochs=3, batch_size=5, **CASES[case])
    fitted = ours(backend, settings, trained_names)
    for s in range(len(COUNTS)):
        expected = theirs(settings, s, trained_names)
        for name, tensor in expected.items():
            torch.testing.assert_close(fitted[name][s], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changing_rate_is_that_of_each_client_s_own_step(backend, case, schedule):
    """Clients with more batches are at another rate at the same time."""
    settings = LocalTraining(epochs=3, batch_size=5, **CASES[case], **SCHEDULES[schedule])
    fitted = ours(backend, settings)
    for s in range(len(COUNTS)):
        for name, tensor in theirs(settings, s).items():
            torch.testing.assert_close(fitted[name][s], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e3])
def test_clipping_is_that_of_torch_for_each_client(max_norm):
    grads = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1.0], [100.0]])
    clipped = grads.clone()
    clip_by_norm(clipped, max_norm)
    for grad, ours_ in zip(grads, clipped, strict=True):
        parameter = torch.nn.Parameter(torch.zeros(20))
        parameter.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        torch.testing.assert_close(ours_, parameter.grad)


def test_a_gradient_that_is_not_a_number_stays_one_in_every_backend():
    """Else a run that diverged would look sound."""
    settings = LocalTraining(max_gradient_norm=0.1, **SGD)
    for backend in BACKENDS:
        network, trainer = make_network(backend), LocalTrainer(settings, backend)
        start = trees.stack([network.init(0)])
        start["3.bias"][0, 0] = torch.nan
        group = trainer.group(start, ClassifierLoss(network), side_by_side(DATA[:1]))
        fitted = fit({"model": group}, Schedule(5), Streams(0, "test", 1, (0,)), backend)
        assert fitted.params["model"]["1.weight"].isnan().all()
