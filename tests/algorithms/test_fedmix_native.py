"""FedMix's whole epochs in the native kernels are the same training as step by step in PyTorch."""

import pytest
import torch

from fedmoe import trees
from fedmoe.algorithms.fedmix.objective import Objective, own_usage
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import DataError
from fedmoe.models.images import LeNet, mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.corrections import Proximal
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.kernel_spec import KernelSpec
from fedmoe.training.native_epochs import kernel_spec_of
from fedmoe.training.optimizers import Adam, Sgd
from smooth_residual import SmoothResidual

SHAPE, CLASSES, ANGLES = (2, 16, 16), 3, 5
COUNTS = (7, 1, 0, 12)
NUM_EXPERTS = 5
EXPERT_IDS_SH = torch.tensor([[0, 1, 2, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 2, 3, 4]])
ALL_IN_USE = torch.ones(4, 4, dtype=torch.bool)
SOME_IN_USE = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 1]], dtype=torch.bool)
MODELS = {
    "lenet": lambda: LeNet(SHAPE, CLASSES, (3, 4), (5,)),
    "mlp": lambda: mlp(SHAPE, CLASSES, [7]),
    "residual": lambda: SmoothResidual(SHAPE, CLASSES),
}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y, angle = (torch.randint(0, size, (count,), generator=generator) for size in (CLASSES, ANGLES))
    return examples(drawn(count, *SHAPE, seed=seed), y)._replace(extra={"angle": angle})


def make_network(model, backend):
    network = Network(MODELS[model], input_shape=SHAPE)
    if backend == "native":
        network.go_native()
    return network


def train(
    backend, *, model="lenet", condition="label", in_use=ALL_IN_USE, optimizer=None, clients=range(4), angles=None
):
    network, clients = make_network(model, backend), list(clients)
    data = side_by_side([rows(COUNTS[s], s) for s in clients])
    values = ANGLES if condition == "angle" else CLASSES
    if angles is not None:
        data = data._replace(extra={"angle": torch.full_like(data.y, angles)})
    experts = [trees.stack([network.init(s, h) for h in range(EXPERT_IDS_SH.shape[1])]) for s in clients]
    gate = {
        "weight": drawn(4, NUM_EXPERTS, network.num_features, seed=1)[clients],
        "bias": torch.zeros(len(clients), 5),
    }
    parts = {
        "experts": trees.stack(experts),
        "posterior": drawn(4, values, NUM_EXPERTS, seed=2)[clients],
        "gate": gate,
    }
    if condition == "client":
        del parts["posterior"]
    frozen = {
        "posterior": torch.zeros(len(clients), 0, NUM_EXPERTS),
        "expert_ids": EXPERT_IDS_SH[clients],
        "in_use": in_use[clients],
        "shares": drawn(4, values, seed=3).softmax(-1)[clients],
    }
    config = FedMixConfig(num_experts=NUM_EXPERTS, condition=condition)
    losses = Objective(config, network)
    if backend == "native":
        assert isinstance(losses.kernel_spec(parts, data, frozen), KernelSpec)  # else nothing is compared
    groups = {"mixture": Group(parts, losses, data, optimizer or Sgd(0.2))}
    if condition == "client":
        usage_SK = drawn(4, NUM_EXPERTS, seed=4).softmax(-1)[clients]
        groups["usage"] = own_usage(config, network, usage_SK, data)
    return fit(groups, Schedule(5, epochs=3), Streams(0, "test", 1, tuple(clients)), backend, frozen=frozen)


def assert_same(one, other):
    trees.tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4), one, other)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("condition", ["label", "angle"])
@pytest.mark.parametrize("in_use", [ALL_IN_USE, SOME_IN_USE], ids=["all", "pruned"])
def test_native_training_equals_sequential_training(model, condition, in_use):
    """Clients of other sizes, without examples, and with other experts."""
    settings = {"model": model, "condition": condition, "in_use": in_use}
    native, sequential = train("native", **settings), train("sequential", **settings)
    assert_same(native, sequential)
    start = train("sequential", **settings, optimizer=Sgd(0.0))
    for part, leaf in trees.to_named(native.params["mixture"]).items():
        assert not torch.equal(leaf, trees.to_named(start.params["mixture"])[part]), f"{part} was not trained"


@pytest.mark.parametrize("model", MODELS)
def test_a_clients_own_q_moves_to_its_closed_form_as_sequentially(model):
    native, sequential = (train(backend, model=model, condition="client") for backend in ("native", "sequential"))
    assert_same(native, sequential)
    usage_SK = native.params["usage"]["share"]
    torch.testing.assert_close(usage_SK.sum(1), torch.ones(4))
    assert usage_SK[0, 3] < 0.05 < usage_SK[2, 4]  # an expert that client 0 does not hold; client 2 never trained


# Adam divides by the size of a gradient, so where that is zero but for rounding, the step is as large as any: with an
# epsilon well above the rounding of gradients (1e-7) the step is a Lipschitz function of the gradient.
@pytest.mark.parametrize("optimizer", [Sgd(0.1, momentum=0.9), Adam(1e-3, epsilon=1e-3)], ids=["momentum", "adam"])
def test_other_optimizers(optimizer):
    settings = {"optimizer": optimizer, "in_use": SOME_IN_USE}
    assert_same(train("native", **settings), train("sequential", **settings))


def test_a_pruned_expert_keeps_every_bit():
    experts = train("native", in_use=SOME_IN_USE).params["mixture"]["experts"]
    start = train("native", in_use=SOME_IN_USE, optimizer=Sgd(0.0)).params["mixture"]["experts"]
    for name, leaf_SH in experts.items():
        assert torch.equal(leaf_SH[~SOME_IN_USE], start[name][~SOME_IN_USE])


def test_company_changes_no_bit():
    together, alone = train("native"), train("native", clients=[3])
    assert all(map(torch.equal, trees.leaves(trees.tree_map(lambda leaf: leaf[3:], together)), trees.leaves(alone)))


def test_a_value_that_q_does_not_know_is_refused_before_the_kernels_read_it():
    with pytest.raises(DataError, match="conditioned on reach from 9 to 9, but q has 5 rows"):
        train("native", condition="angle", angles=9)


def test_a_clients_own_q_with_a_pull_of_its_own_is_left_to_pytorch():
    """The kernels move q by its closed form alone."""
    config = FedMixConfig(num_experts=NUM_EXPERTS, condition="client")
    network, data, usage = make_network("mlp", "native"), rows(3, 0), torch.full((1, NUM_EXPERTS), 0.2)
    data = side_by_side([data])
    frozen = {"expert_ids": EXPERT_IDS_SH[:1], "in_use": ALL_IN_USE[:1], "shares": torch.zeros(1, 0)}
    mixture = Group({"experts": {}, "gate": {}}, Objective(config, network), data, Sgd(0.1))
    own = own_usage(config, network, usage, data)
    assert isinstance(kernel_spec_of({"mixture": mixture, "usage": own}, frozen), KernelSpec)
    pulled = own._replace(proximal=Proximal({"share": usage}, 1.0))
    assert "'usage' has proximal beside 'mixture'" in kernel_spec_of({"mixture": mixture, "usage": pulled}, frozen)


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy": True},
        {"objective": "mixture"},
        {"personal_bias": True},
        {"condition": "client", "prune_threshold": 0.5},
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_pytorch(settings):
    parts = {"experts": {}, "posterior": torch.zeros(1, CLASSES, NUM_EXPERTS), "gate": {}}
    frozen = {"expert_ids": EXPERT_IDS_SH[:1], "in_use": SOME_IN_USE[:1], "shares": torch.zeros(1, CLASSES)}

    def kernel_spec(**options):
        config = FedMixConfig(num_experts=NUM_EXPERTS, **options)
        return Objective(config, make_network("mlp", "native")).kernel_spec(parts, rows(3, 0), frozen)

    assert isinstance(kernel_spec(prune_threshold=0.5), KernelSpec)
    assert isinstance(kernel_spec(**settings), str)
