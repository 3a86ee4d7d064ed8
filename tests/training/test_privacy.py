"""DP-SGD in the trainer, against Opacus and against its own definition."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import Examples
from fedmoe.errors import ConfigError, DataError
from fedmoe.models.network import Network
from fedmoe.models.resnet import ResNet
from fedmoe.models.task import Classification, Regression
from fedmoe.models.text import TextLSTM
from fedmoe.noise import NoiseKey
from fedmoe.private_steps import Charge, Mechanism, PrivateSteps
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.classifier import LOGIT_OFFSET, ClassifierLoss
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.flat import Layout
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Sgd
from fedmoe.training.privacy import clipped_sums
from smooth_residual import SmoothResidual

BACKENDS = ("batched", "native", "sequential")
FEATURES, CLASSES, RATE = 6, 3, 0.5
NETWORKS = {
    "dense": ((FEATURES,), lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))),
    "conv": (
        (1, 8, 8),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)
        ),
    ),
    "residual": ((1, 8, 8), lambda: SmoothResidual((1, 8, 8), CLASSES, width=16, stride=1)),
}


def network_of(kind: str, backend: str) -> Network:
    shape, factory = NETWORKS[kind]
    network = Network(factory, "expert", shape)
    if backend == "native":
        network.go_native()
    return network


def drawn(count: int, shape: tuple[int, ...], seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(count, *shape, generator=generator)
    return examples(x, torch.randint(CLASSES, (count,), generator=generator))


def steps_of(clients=(0,), seed: int = 0, first: int = 0, source: str = "seeded", **changes) -> PrivateSteps:
    mechanism = Mechanism(**{"noise_multiplier": 0.0, "sampling_rate": 0.5, "expected_batch_size": 4.0, **changes})
    keys = {
        c: NoiseKey.of_seed(seed, c) if source == "seeded" else NoiseKey("secure", bytes([c] * 32)) for c in clients
    }
    return PrivateSteps(mechanism, keys, dict.fromkeys(clients, first))


def trained(network: Network, data: Examples, private: PrivateSteps, backend: str, steps: int = 1, **options):
    size = len(data.counts)
    start = trees.stack([network.init(7)] * size)
    group = Group(start, ClassifierLoss(network), data, Sgd(RATE), **options)
    rng = Streams(0, "train", 1, tuple(range(size)), private_steps=private)
    fitted = fit({"model": group}, Schedule(4, steps=steps), rng, backend)
    return fitted, start


def moved(network: Network, data: Examples, private: PrivateSteps, backend: str, **options) -> list[torch.Tensor]:
    """What one step subtracted from each client's weights, as a gradient."""
    fitted, start = trained(network, data, private, backend, **options)
    layout = Layout.of(start)
    return list((layout.pack(start) - layout.pack(fitted.params["model"])) / RATE)


def opacus_sum(kind: str, rows: Examples, clip: float, per_tensor: bool) -> torch.Tensor:
    """Opacus's own clipped sum of the same model on the same examples, in the order of names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

        module = NETWORKS[kind][1]()
        module.load_state_dict(network_of(kind, "batched").init(7))
        wrapped = GradSampleModule(module, loss_reduction="sum")
        named = dict(module.named_parameters())
        plain = torch.optim.SGD(module.parameters(), lr=1.0)
        common = {"noise_multiplier": 0.0, "expected_batch_size": None, "loss_reduction": "sum"}
        if per_tensor:
            optimizer = DPPerLayerOptimizer(plain, max_grad_norm=[clip] * len(named), **common)
        else:
            optimizer = DPOptimizer(plain, max_grad_norm=clip, **common)
        F.cross_entropy(wrapped(rows.x), rows.y, reduction="sum").backward()
        optimizer.clip_and_accumulate()
    return torch.cat([named[name].summed_grad.flatten() for name in sorted(named)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("clipping", ["whole", "per_tensor"])
def test_clipped_sums_are_those_of_opacus(kind: str, clipping: str, backend: str) -> None:
    rows = drawn(9, NETWORKS[kind][0])
    private = steps_of(sampling_rate=1.0, expected_batch_size=9.0, clip_norm=0.7, clipping=clipping, microbatch_size=4)
    (ours,) = moved(network_of(kind, backend), side_by_side([rows]), private, backend)
    theirs = opacus_sum(kind, rows, 0.7, clipping == "per_tensor")
    torch.testing.assert_close(9 * ours, theirs, atol=2e-5, rtol=1e-4)
    assert theirs.norm() > 0.7  # something was clipped, and something is left


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_company_change_no_clipped_gradient(backend: str) -> None:
    network, rows = network_of("dense", backend), [drawn(count, (FEATURES,), count) for count in (9, 3, 1)]
    together = moved(network, side_by_side(rows), steps_of((0, 1, 2), sampling_rate=1.0), backend)
    for client, one in enumerate(rows):
        private = steps_of((0,), sampling_rate=1.0)
        private.keys = {0: steps_of((0, 1, 2)).keys[client]}
        (alone,) = moved(network, side_by_side([one]), private, backend)
        torch.testing.assert_close(together[client], alone, atol=1e-6, rtol=1e-5)


def test_microbatches_give_the_same_sum() -> None:
    network, data = network_of("conv", "batched"), side_by_side([drawn(10, (1, 8, 8))])
    (whole,), (small,) = (
        moved(network, data, steps_of(sampling_rate=1.0, microbatch_size=size), "batched") for size in (64, 3)
    )
    torch.testing.assert_close(whole, small, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clipping", ["whole", "per_tensor"])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("task", [Classification(), Regression("huber")], ids=["classes", "numbers"])
def test_the_kernels_sum_what_single_gradients_sum_to(kind: str, clipping: str, task) -> None:
    """More examples than the kernels hold at a time, of two clients, with an offset and a tensor that stays."""
    (shape, _), sizes = NETWORKS[kind], (150, 70)
    mechanism = Mechanism(0.0, 1.0, 4.0, clip_norm=0.3, clipping=clipping)
    rows = side_by_side([drawn(size, shape, size) for size in sizes])
    y = rows.y if isinstance(task, Classification) else torch.stack([rows.y] * CLASSES, dim=-1).float()
    offset = {LOGIT_OFFSET: torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.0, -1.0]])}
    found = {}
    for backend in ("native", "batched"):
        network = network_of(kind, backend)
        point = trees.stack([network.init(seed) for seed in (1, 2)])
        layout = Layout.of(point)
        stays = [
            torch.full((size,), name == layout.names[-1]) for name, size in zip(layout.names, layout.sizes, strict=True)
        ]
        found[backend] = clipped_sums(
            "model", ClassifierLoss(network, task), {"model": layout}, {"model": layout.pack(point)}, offset,
            Batch(rows.x, y, {}, training=True), torch.arange(150) < torch.tensor(sizes)[:, None], mechanism,
            torch.cat(stays),
        )  # fmt: skip
    torch.testing.assert_close(found["native"], found["batched"], atol=2e-5, rtol=1e-4)
    assert found["native"].norm() > 1 and found["native"][:, -layout.sizes[-1] :].norm() == 0


@pytest.mark.parametrize(
    ("shape", "factory"),
    [
        ((3, 8, 8), lambda: ResNet((3, 8, 8), CLASSES, (1, 1), (8, 16), 2, "pad")),
        ((7,), lambda: TextLSTM(20, CLASSES, embedding=5, hidden=4)),
    ],
    ids=["residual", "lstm"],
)
def test_the_kernels_clip_other_layers_as_one_example_after_another_is_clipped(shape, factory) -> None:
    network, generator = Network(factory, "expert", shape), torch.Generator().manual_seed(0)
    network.go_native()
    x = torch.randint(20, (6, 7), generator=generator) if len(shape) == 1 else torch.randn(6, *shape)
    y, start = torch.randint(CLASSES, (6,), generator=generator), network.init(1)
    layout, mechanism = Layout.of(trees.stack([start])), Mechanism(0.0, 1.0, 4.0, clip_norm=0.3)
    ours = clipped_sums(
        "model", ClassifierLoss(network), {"model": layout}, {"model": layout.pack(trees.stack([start]))}, {},
        Batch(x[None], y[None], {}, training=True), torch.ones(1, 6, dtype=torch.bool), mechanism,
    )  # fmt: skip
    module, weights = factory(), {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    expected = torch.zeros_like(ours[0])
    for one in range(6):
        loss = F.cross_entropy(functional_call(module, weights, (x[one : one + 1],)), y[one : one + 1])
        grads = torch.autograd.grad(loss, [weights[name] for name in layout.names])
        gradient = torch.cat([grad.flatten() for grad in grads])
        expected += gradient * (0.3 / gradient.norm()).clamp_max(1)
    torch.testing.assert_close(ours[0], expected, atol=1e-6, rtol=1e-4)


def test_labels_that_the_model_does_not_have_are_refused_before_the_kernels_read_them() -> None:
    network, rows = network_of("dense", "native"), drawn(5, (FEATURES,))
    rows.y[3] = CLASSES
    with pytest.raises(DataError, match="to 3, but the model has 3 scores"):
        moved(network, side_by_side([rows]), steps_of(sampling_rate=1.0), "native")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_example_whose_gradient_is_not_finite_counts_for_nothing(backend: str) -> None:
    network, rows = network_of("dense", backend), drawn(5, (FEATURES,))
    broken = rows._replace(x=rows.x.clone())
    broken.x[2] = 1e38
    kept = examples(rows.x[[0, 1, 3, 4]], rows.y[[0, 1, 3, 4]])
    private = {"sampling_rate": 1.0}
    (first,), (second,) = (moved(network, side_by_side([one]), steps_of(**private), backend) for one in (broken, kept))
    assert first.isfinite().all()
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


def test_batches_are_poisson_samples_and_an_empty_one_still_sends_noise() -> None:
    private = steps_of(sampling_rate=0.1)
    sizes = np.array([len(private.sampled_rows(0, step, 50)) for step in range(400)])
    assert sizes.std() > 1 and abs(sizes.mean() - 5) < 0.4
    assert abs(sizes.var() - 50 * 0.1 * 0.9) < 1.0  # binomial
    empty = side_by_side([drawn(3, (FEATURES,))])._replace(counts=torch.tensor([0]))
    private = steps_of(noise_multiplier=2.0, clip_norm=0.5, sampling_rate=0.1)
    (noise,) = moved(network_of("dense", "batched"), empty, private, "batched")
    assert noise.abs().min() > 0 and private.taken[0] == [Charge("gradient", 1, 0.1, 2.0, 0.5)]


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize(("clipping", "tensors"), [("whole", 1), ("per_tensor", 4)])
def test_the_noise_has_the_stated_deviation_in_every_coordinate(source: str, clipping: str, tensors: int) -> None:
    private = steps_of(noise_multiplier=1.5, clip_norm=0.4, clipping=clipping, source=source)
    sensitivity = private.mechanism.sensitivity(tensors)
    assert sensitivity == pytest.approx(0.4 * tensors**0.5 if clipping == "per_tensor" else 0.4)
    draws = torch.stack([private.noise(0, step, 50, sensitivity) for step in range(4000)])
    expected = 1.5 * sensitivity
    assert draws.std() == pytest.approx(expected, rel=0.01)
    assert ((draws.std(0) / expected - 1).abs() < 0.06).all() and (draws.mean(0).abs() < 0.08 * expected).all()
    z = draws.flatten() / expected
    assert (z.abs() < 1).double().mean() == pytest.approx(0.6827, abs=0.005)
    assert z.pow(4).mean() == pytest.approx(3.0, abs=0.1)
    overlap = torch.corrcoef(draws[:2])[0, 1]
    assert abs(overlap) < 0.5  # steps do not share draws


def test_a_step_draws_the_same_whenever_it_is_asked_and_secrets_decide_what() -> None:
    one, other = NoiseKey("secure", b"a" * 32), NoiseKey("secure", b"b" * 32)
    assert torch.equal(one.normal("noise", 3, 10), one.normal("noise", 3, 10))
    assert not torch.equal(one.normal("noise", 3, 10), other.normal("noise", 3, 10))
    assert not torch.equal(one.normal("noise", 3, 10), one.normal("noise", 4, 10))
    assert NoiseKey.fresh() != NoiseKey.fresh()


def test_every_client_takes_the_same_number_of_steps_however_many_records_it_has() -> None:
    network, rows = network_of("dense", "batched"), [drawn(9, (FEATURES,)), drawn(1, (FEATURES,))]
    private = steps_of((0, 1), noise_multiplier=1.0, sampling_rate=0.3)
    group = Group(trees.stack([network.init(7)] * 2), ClassifierLoss(network), side_by_side(rows), Sgd(RATE))
    rng = Streams(0, "train", 1, (0, 1), private_steps=private)
    fitted = fit({"model": group}, Schedule(4, epochs=2), rng, "batched")
    assert [charges[0].steps for charges in private.taken.values()] == [8, 8]  # twice the 4 that see a record once
    assert fitted.loss_S.isnan().all()  # it would have no noise


def test_a_regression_is_clipped_too() -> None:
    network = Network(lambda: nn.Linear(FEATURES, 1), "expert", (FEATURES,))
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0))
    weights = trees.stack([network.init(1)])
    layout = Layout.of(weights)
    batch = Batch(x[None], 100 * torch.ones(1, 4), {}, training=True)
    mechanism = Mechanism(0.0, 1.0, 4.0, clip_norm=1.0)
    loss = ClassifierLoss(network, Regression())
    total = clipped_sums(
        "model", loss, {"model": layout}, {"model": layout.pack(weights)}, {}, batch, torch.ones(1, 4).bool(), mechanism
    )
    single = torch.cat([x, torch.ones(4, 1)], dim=1)  # d loss / d (weight, bias) is along (x, 1)
    expected = -F.normalize(single, dim=1).sum(0)
    weight_last = torch.cat([expected[-1:], expected[:-1]])  # names in order: bias, weight
    torch.testing.assert_close(total[0], weight_last, atol=1e-5, rtol=1e-4)


def test_what_clipping_cannot_bound_is_refused() -> None:
    network, data = network_of("dense", "batched"), side_by_side([drawn(5, (FEATURES,))])
    start, loss = trees.stack([network.init(7)]), ClassifierLoss(network)
    rng = Streams(0, "train", 1, (0,), private_steps=steps_of())
    group = Group(start, loss, data, Sgd(RATE))
    with pytest.raises(ConfigError, match="a term of the whole batch"):
        fit({"model": group._replace(batch_term=lambda *_: torch.zeros(()))}, Schedule(4), rng, "batched")
    with pytest.raises(ConfigError, match="2 groups"):
        fit({"model": group, "gate": group}, Schedule(4), rng, "batched")
    with pytest.raises(ConfigError, match="validation loss"):
        fit({"model": group}, Schedule(4), rng, "batched", stopping=EarlyStopping(loss, data, 1, 1))
