"""The kernels read and write memory without looking: what is of another model is refused before they are called."""

import pytest
import torch
from torch import nn

from fedmoe import trees
from fedmoe.algorithms.fedmix.kernel_inputs import FedMixKernel
from fedmoe.algorithms.fedmix.objective import Objective
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import DataError, MessageError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss, MixtureLoss
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.native_checks import readable_images
from fedmoe.training.optimizers import Sgd

WIDTH, HIDDEN, CLASSES, CLIENTS = 6, 5, 3, 2
NAMES = ["1.weight", "1.bias", "3.weight", "3.bias"]


def native(factory, shape=(WIDTH,)):
    network = Network(factory, "expert", shape)
    network.go_native()
    return network


def make_network(width=WIDTH, hidden=HIDDEN, outputs=CLASSES):
    return native(lambda: mlp((width,), outputs, (hidden,)), (width,))


def make_data(shape=(WIDTH,), count=4):
    generator = torch.Generator().manual_seed(0)
    return side_by_side([examples(torch.randn(count, *shape, generator=generator), torch.arange(count) % CLASSES)] * 2)


def starts(network, clients=CLIENTS):
    return trees.stack([network.init(s) for s in range(clients)])


def train(params, data=None, network=None, frozen=None):
    group = Group(params, ClassifierLoss(network or make_network()), data or make_data(), Sgd(0.1))
    return fit({"model": group}, Schedule(2), Streams(0, "test", 1, tuple(range(CLIENTS))), "native", frozen=frozen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_weights_of_another_dtype_are_refused(name, dtype):
    params = starts(make_network())
    params[name] = params[name].to(dtype)
    expected = str(dtype).removeprefix("torch.")
    with pytest.raises(MessageError, match=rf"{name} is {expected} .*float32 .* is expected"):
        train(params)


def test_weights_that_are_all_of_another_dtype_are_refused():
    params = {name: leaf.double() for name, leaf in starts(make_network()).items()}
    with pytest.raises(MessageError, match=r"float64 .*float32 .* is expected"):
        train(params)


@pytest.mark.parametrize(("hidden", "outputs"), [(HIDDEN - 2, CLASSES), (HIDDEN + 2, CLASSES), (HIDDEN, CLASSES - 1)])
def test_weights_of_another_width_are_refused(hidden, outputs):
    with pytest.raises(MessageError, match=r"has shape .*but shape .* is expected.*another model"):
        train(starts(make_network(hidden=hidden, outputs=outputs)))


def test_a_tensor_that_is_missing_or_too_many_is_refused():
    params = starts(make_network())
    with pytest.raises(MessageError, match=r"3\.bias is missing, but shape \(3,\) is expected"):
        train({name: leaf for name, leaf in params.items() if name != "3.bias"})
    with pytest.raises(MessageError, match=r"extra has shape \(1,\), but no such tensor is expected"):
        train({**params, "extra": torch.zeros(CLIENTS, 1)})


def test_weights_of_fewer_clients_than_there_are_data_for_are_refused():
    with pytest.raises(MessageError, match=r"1\.\w+ is float32 of shape \(1, .*shape \(2, "):
        train(starts(make_network(), clients=1))


def test_labels_counts_and_examples_that_do_not_fit_are_refused():
    params, data = starts(make_network()), make_data()
    with pytest.raises(MessageError, match="the labels is int32"):
        train(params, data._replace(y=data.y.int()))
    with pytest.raises(DataError, match="but the data have 4 rows for each"):
        train(params, data._replace(counts=torch.tensor([4, 5])))
    with pytest.raises(DataError, match="do not fit together"):
        train(params, data._replace(x=data.x[:, :2]))
    with pytest.raises(DataError, match=r"shape \(6,\) are expected"):
        train(params, make_data((WIDTH - 1,)))


def test_a_logit_offset_of_other_classes_is_refused():
    with pytest.raises(MessageError, match=r"the logit offset is .*\(2, 2\).*\(2, 3\)"):
        train(starts(make_network()), frozen={"logit_offset": torch.zeros(CLIENTS, CLASSES - 1)})


def test_what_a_mixtures_gate_alone_would_read_out_of_bounds_is_refused():
    """The first network reads vectors of floats; the gate takes them for rows of its embedding."""
    expert, gate = make_network(), native(lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 1)))
    data = make_data()
    data = data._replace(extra={"second": torch.zeros(*data.y.shape, CLASSES)})
    start = {"first": starts(expert), "gate": starts(gate)}
    groups = {"mixture": Group(start, MixtureLoss(expert, gate, "first", "second"), data, Sgd(0.1))}
    with pytest.raises(DataError, match="words are numbers of rows of the embedding"):
        fit(groups, Schedule(2), Streams(0, "test", 1, (0, 1)), "native")


def test_a_mixture_reads_images_as_the_network_that_reads_past_their_end():
    """A convolution reads up to a vector past the end of an image, also where it is the second network."""
    shape = (1, 4, 4)
    expert = native(lambda: mlp(shape, CLASSES, ()), shape)
    gate = native(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)), shape)
    data = make_data(shape)
    data = data._replace(x=data.x.contiguous())
    for first, second in ((expert, gate), (expert, expert)):
        images = readable_images([first.native, second.native], data, [4, 4])
        room = images.untyped_storage().nbytes() // 4 - images.numel()
        assert (room >= 32) == (second is gate)


# FedMix


def fedmix(*, change=None, network=None, experts=3, held=3):
    network = network or make_network()
    parts = {
        "experts": trees.stack([trees.stack([network.init(s, h) for h in range(held)]) for s in range(CLIENTS)]),
        "posterior": torch.zeros(CLIENTS, CLASSES, experts),
        "gate": {"weight": torch.zeros(CLIENTS, experts, HIDDEN), "bias": torch.zeros(CLIENTS, experts)},
    }
    frozen = {
        "expert_ids": torch.arange(3).expand(CLIENTS, 3),
        "in_use": torch.ones(CLIENTS, 3, dtype=torch.bool),
        "shares": torch.full((CLIENTS, CLASSES), 1 / CLASSES),
    }
    if change:
        change(parts, frozen)
    losses = Objective(FedMixConfig(num_experts=3), make_network())
    groups = {"mixture": Group(parts, losses, make_data(), Sgd(0.1))}
    return fit(groups, Schedule(2), Streams(0, "test", 1, tuple(range(CLIENTS))), "native", frozen=frozen)


def set_part(name, tensor):
    def change(parts, frozen):
        (parts if name in parts else frozen)[name] = tensor

    return change


def test_the_cases_below_are_refused_for_what_they_change_alone():
    assert fedmix().loss_S.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held": 2}, r"experts/1\.bias has shape \(2, 5\), but shape \(3, 5\) is expected"),
        ({"network": make_network(hidden=4)}, r"experts/1\.bias has shape \(3, 4\)"),
        ({"experts": 2}, r"gate/bias has shape \(2,\), but shape \(3,\)"),
        ({"change": set_part("gate", {"weight": torch.zeros(2, 3, 4), "bias": torch.zeros(2, 3)})}, "gate/weight"),
        ({"change": set_part("gate", {"weight": torch.zeros(2, 3, 5).double(), "bias": torch.zeros(2, 3)})}, "float64"),
        ({"change": set_part("expert_ids", torch.tensor([[0, 1, 3], [0, 1, 2]]))}, "expert_ids reach from 0 to 3"),
        ({"change": set_part("expert_ids", torch.tensor([[0, -1, 2], [0, 1, 2]]))}, "expert_ids reach from -1 to 2"),
        ({"change": set_part("expert_ids", torch.zeros(2, 3))}, "expert_ids is float32"),
        ({"change": set_part("in_use", torch.ones(2, 2, dtype=torch.bool))}, r"in_use is bool of shape \(2, 2\)"),
        ({"change": set_part("shares", torch.ones(2, 2))}, r"shares is float32 of shape \(2, 2\).*\(2, 3\)"),
    ],
)  # fmt: skip
def test_fedmix_parts_of_another_model_are_refused(options, message):
    with pytest.raises(MessageError, match=message):
        fedmix(**options)


def test_side_information_and_experts_of_other_clients_or_examples_are_refused():
    def bind(condition_SN, expert_ids_SH):
        in_use_SH = torch.ones_like(expert_ids_SH, dtype=torch.bool)
        kernel = FedMixKernel(3, HIDDEN, 2, (2, 4), condition_SN, expert_ids_SH, in_use_SH, torch.zeros(2, 2))
        return kernel.bind({"posterior": 0, "gate/weight": 0, "gate/bias": 0}, {})

    values_SN, ids_SH = torch.zeros(2, 4).long(), torch.zeros(2, 3).long()
    assert bind(values_SN, ids_SH).function == "fedmoe_train_fedmix"
    with pytest.raises(MessageError, match=r"conditioned on is int64 of shape \(2, 3\).*\(2, 4\)"):
        bind(values_SN[:, :3], ids_SH)
    with pytest.raises(MessageError, match=r"expert_ids is int64 of shape \(1, 3\).*\(2, 3\)"):
        bind(values_SN, ids_SH[:1])


def test_a_clients_own_q_of_another_model_is_refused():
    kernel = FedMixKernel(
        3, HIDDEN, None, (2, 4), torch.zeros(2, 4).long(), torch.zeros(2, 3).long(), torch.ones(2, 3).bool(),
        torch.zeros(2, 0), usage_group="usage",
    )  # fmt: skip
    with pytest.raises(MessageError, match=r"usage is float32 of shape \(2, 2\)"):
        kernel.bind({"gate/weight": 0, "gate/bias": 0}, {"usage": torch.zeros(2, 2)})
