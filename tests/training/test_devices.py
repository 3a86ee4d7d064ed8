"""Training on another device, as far as can be seen without one: every tensor of it is on the `meta` device.

No operation may mix tensors of two devices: on a GPU that is an error, or a copy that nobody asked for. What crosses is
watched too: in a step only numbers of rows, drawn on the CPU.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from builders import make_expert, make_gate, tiny_config, tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe import assembly, trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.assembly.settings import resolve_device
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.config import parse_config
from fedmoe.engines.embedded import InProcess, open_transport
from fedmoe.errors import ConfigError, RunError
from fedmoe.experiment import run_events
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.testing.outcome import RUN_ID, run_algorithm
from fedmoe.training import devices
from fedmoe.training.augment import AUGMENTATIONS
from fedmoe.training.class_weights import ClassWeightedLoss
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.corrections import Proximal
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.inference import per_example
from fedmoe.training.optimizers import Adam, Sgd
from fedmoe.training.rates import Rates, RateSchedule

# Who look at numbers of a client's state to predict, and what they are told: the prior mixture does in every step.
READERS = {"ifca": (True, False), "knn_per": (True, False), "lg_fedavg": (True, False), "prior_mixture": (True,)}
META = torch.device("meta")
RNG = Streams(0, "test", 1, (0, 1, 2))
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OneDevice(TorchDispatchMode):
    """Refuses every operation on tensors of two devices; keeps what was copied from one to another.

    A number that is read from the device is `answer`.
    """

    def __init__(self, answer=True):
        super().__init__()
        self.copied, self.computed, self.reads, self.answer = [], 0, 0, answer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.reads += 1
            return self.answer
        result = function(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        # A number of Python's is a tensor without axes on the CPU here; PyTorch takes those on any device.
        kinds = {one.device.type for one in (*given, *made) if one.dim() or one.is_meta}
        self.computed += kinds == {"meta"}
        if len(kinds) > 1:
            assert function in COPIES, f"{function} mixes {sorted(kinds)}: {[tuple(t.shape) for t in given]}"
            self.copied += [one.dtype for one in made]
        return result


@pytest.fixture(autouse=True)
def something_comes_back(monkeypatch):
    """Nothing can be read from the meta device: zeros come back in its place."""

    def to_host(tree):
        return trees.tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu"), tree)

    for name in ("devices", "fit", "inference"):
        monkeypatch.setattr(f"fedmoe.training.{name}.to_host", to_host)


def rows(count, seed, shape=(4,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    return examples(x, torch.randint(0, 3, (count,), generator=generator))


def cohort(network, counts=(7, 2, 12), shape=(4,)):
    data = side_by_side([rows(count, seed, shape) for seed, count in enumerate(counts)])
    return trees.stack([network.init(s) for s in range(len(counts))]), data


def backbone():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 3))


def with_buffers():
    """BatchNorm in eval mode reads its buffers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))


def small_cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(50, 3))


RATES = Rates(RateSchedule("step", every=1, factor=0.5), RateSchedule("cosine"), 9)
OPTIMIZERS = [Sgd(0.1), Sgd(0.1, 0.9, 0.1), Adam(0.1), Adam(0.1, weight_decay=0.1, decoupled=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("everything", [False, True])
def test_a_step_computes_on_one_device_and_is_sent_numbers_of_rows_alone(optimizer, everything):
    """Ragged clients, so that some sit steps out; proximal pull, offsets, untrained parts, limits and rates."""
    network = Network(make_expert)
    start, data = cohort(network)
    more = {
        "proximal": Proximal(start, 0.1),
        "gradient_offset": start,
        "trained_names": frozenset({"3.weight"}),
        "max_gradient_norm": 1.0,
        "rates": RATES,
        "batch_term": lambda trainable, _frozen, _batch, real: torch.arange(3.0).sum() * real.sum(),
        "noise": lambda generator, count: {"noise": torch.randn(count, generator=generator)},
    }
    group = Group(start, ClassifierLoss(network), data, optimizer, **(more if everything else {}))
    frozen = {"logit_offset": torch.zeros(3, 3)}
    copied = []
    for epochs in (1, 3):
        with OneDevice() as watch:
            fitted = fit({"model": group}, Schedule(5, epochs), RNG, "batched", frozen, None, META)
        assert watch.computed > 100 * epochs
        assert all(leaf.device.type == "cpu" for leaf in trees.leaves(tuple(fitted)))
        copied.append([dtype for dtype in watch.copied if dtype.is_floating_point])
    if not everything:  # else noise and rates are sent with each step
        assert copied[0] == copied[1] != []


@pytest.mark.parametrize("make", [backbone, with_buffers])
def test_constants_of_a_module_cross_once(make):
    network = Network(make)
    start, data = cohort(network)
    group, loss = Group(start, ClassifierLoss(network), data, Sgd(0.1)), ClassifierLoss(network)
    for crossed in (True, False):
        with OneDevice() as watch:
            fit({"model": group}, Schedule(5, epochs=2), RNG, "batched", None, None, META)
        sent = len(trees.leaves((start, data.x, data.y)))
        assert (len([one for one in watch.copied if one.is_floating_point]) > sent - 1) == crossed
    x = rows(5, 1).x
    assert network(network.init(0), x).device.type == "cpu"  # the constants come back for it
    with OneDevice():
        per_example(lambda tree, batch: loss({"model": tree}, {}, batch), start, data, "batched", META)


def test_images_that_are_changed_and_early_stopping_stay_on_the_device():
    network = Network(small_cnn)
    start, data = cohort(network, shape=(1, 5, 5))
    loss = ClassWeightedLoss(ClassifierLoss(network), (1.0, 2.0, 3.0))
    group = Group(start, loss, data, Adam(0.1), augmentation=AUGMENTATIONS["crop_flip"])
    stopping = EarlyStopping(loss, data, patience=2)
    with OneDevice() as watch:
        fit({"model": group}, Schedule(5, epochs=9), RNG, "batched", None, stopping, META)
    assert watch.computed > 100 and not watch.reads


def on_meta(name):
    entry = {**CATALOG, **PROBES}[name]
    setup = tiny_setup()
    trainers = {stage: getattr(setup, stage)._replace(device=META) for stage in ("federated", "local", "personal")}
    return entry.factory(entry.config(), setup._replace(**trainers))


# A kind of training each: a model, a mixture, experts, heads, a second model.
QUICK = ("fedavg", "specialist_mixture", "fedmix", "fedjets", "fedrep", "ditto", "domain_experts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in {**CATALOG, **PROBES}]
)
def test_a_whole_run_of_every_algorithm_computes_on_one_device(name, tmp_path, monkeypatch):
    """Training, inference and prediction; whatever losses make themselves is made where they compute. Messages and
    private states are written as bytes, which nothing on the device could be."""
    monkeypatch.setattr(assembly.Parts, "device", META)
    for answer in READERS.get(name, (True,)):
        with OneDevice(answer) as watch:
            outcome = run_algorithm(on_meta(name), tiny_federation(), tmp_path / str(answer) / "store", rounds=1)
        assert watch.computed > 20 and outcome.scores and bool(watch.reads) == (name in READERS)
    assert all(leaf.device.type == "cpu" for leaf in trees.leaves((outcome.server, *outcome.delivered.values())))


# What is said and chosen


def engine(**settings):
    config = tiny_config("fedavg")
    return config.model_copy(update={"engine": config.engine.model_copy(update={"backend": "auto", **settings})})


@pytest.fixture
def found(monkeypatch):
    """Which devices PyTorch claims to find."""

    def find(*names):
        monkeypatch.setattr(devices, "available", lambda name: name in ("cpu", *names))

    find()
    return find


def test_a_device_that_is_not_there_is_an_error_that_says_so(found):
    with pytest.raises(ConfigError, match=r"engine\.device='cuda'.*none but the cpu.*engine\.device = 'auto'"):
        resolve_device(engine(device="cuda").engine)
    found("mps")
    with pytest.raises(ConfigError, match=r"engine\.device='cuda'.*it finds mps"):
        resolve_device(engine(device="cuda").engine)


@pytest.mark.parametrize(("there", "chosen"), [((), "cpu"), (("mps",), "mps"), (("cuda", "mps"), "cuda")])
def test_auto_takes_what_is_there(found, there, chosen):
    found(*there)
    assert resolve_device(engine(device="auto", workers=None).engine) == chosen


@pytest.mark.parametrize("wrong", [{"workers": 2}, {"backend": "native"}, {"backend": "sequential"}, {"name": "ray"}])
def test_settings_that_need_the_cpu_are_refused_beside_a_device_and_come_first_to_auto(found, wrong):
    found("cuda")
    ((key, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"engine\.device='cuda' and engine\.{key}={value!r} do not go together"):
        resolve_device(engine(device="cuda", **{"workers": None, **wrong}).engine)
    with pytest.raises(ConfigError, match="privacy"):
        resolve_device(engine(device="cuda", workers=None).engine, private=True)
    assert resolve_device(engine(device="auto", **{"workers": None, **wrong}).engine) == "cpu"


def test_a_device_is_served_by_one_process_with_the_batched_backend(found, tmp_path):
    found("cuda")
    config = engine(device="auto", workers=None)
    parts = assembly.build(config, federation=tiny_federation(), expert=make_expert, gate=make_gate)
    assert parts.backend == "batched" and parts.config.engine.device == "cuda" == parts.setup.federated.device.type
    assert isinstance(open_transport(parts, tmp_path / "store", RUN_ID), InProcess)
    with pytest.raises(ConfigError, match=r"engine\.device"):
        parse_config({"engine": {"device": "tpu"}})


def test_a_run_that_began_on_the_cpu_stays_there(found, tmp_path):
    """Numbers of another device agree to float tolerance only."""
    runs = [
        partial(run_events, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path)
        for _ in range(2)
    ]
    list(runs[0](engine(device="auto", workers=None)))
    found("cuda")
    *_, result = runs[1](engine(device="auto", workers=None))
    assert result.data["config"]["engine"]["device"] == "cpu"


def test_too_little_memory_is_said(monkeypatch):
    def exhausted(*_arguments):
        raise torch.OutOfMemoryError("no room")

    network = Network(make_expert)
    start, data = cohort(network)
    with pytest.raises(RunError, match=r"'cpu' has not enough memory for 3 clients.*engine\.cohort_size"):
        fit({"model": Group(start, exhausted, data, Sgd(0.1))}, Schedule(5), RNG, "batched")
