import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmoe.models.images import LeNet, SmallCNN, mlp
from fedmoe.models.resnet import resnet
from fedmoe.native.layers import (
    ADD,
    AVERAGE_POOL,
    CONV,
    DENSE,
    GROUP_NORM,
    INPUT,
    MAX_POOL,
    NONE,
    RELU,
    SUBSAMPLE,
    TO_CHANNELS_FIRST,
    Unsupported,
)
from fedmoe.native.program import program_of, without_output


class Handwritten(nn.Module):
    """The usual style: layers in the constructor, functions in between."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 12), nn.Linear(12, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(self.conv2(x), kernel_size=(2, 2), stride=2).relu()
        return self.fc2(torch.relu(self.fc1(torch.flatten(x, 1))))


class Applied(nn.Module):
    """A dense layer and a function of its output."""

    def __init__(self, function, unused=None):
        super().__init__()
        self.layer, self.function, self.unused = nn.Linear(4, 4), function, unused

    def forward(self, x):
        return self.function(self.layer(x))


class Plus(nn.Module):
    """A network and its own input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


def kinds(module, shape):
    return [layer.kind for layer in program_of(module, shape).layers]


def test_convolution_relu_and_pooling_are_one_block_in_whichever_order_and_style():
    expected = [CONV, CONV, TO_CHANNELS_FIRST, DENSE, DENSE]
    assert kinds(Handwritten(), (3, 32, 32)) == expected
    assert kinds(LeNet((3, 32, 32), 10, (6, 16), (12,)), (3, 32, 32)) == expected
    for layer in program_of(Handwritten(), (3, 32, 32)).layers[:2]:
        assert layer.relu and (layer.qh, layer.qw, layer.rh, layer.rw) == (2, 2, 2, 2)
    assert [layer.relu for layer in program_of(Handwritten(), (3, 32, 32)).layers[3:]] == [1, 0]


def test_a_program_names_the_parameters_that_its_layers_count():
    program = program_of(SmallCNN((3, 32, 32), 10), (3, 32, 32))
    assert program.num_outputs == 10 and program.channels_last
    assert len(program.params) == 10 == len(set(program.params))
    assert program.params[program.layers[0].weight] == "features.0.weight"
    assert program.params[program.layers[-1].bias] == "head.4.bias"
    assert [layer.output for layer in program.layers[:2]] == [(6, 14, 14), (16, 5, 5)]


def test_layers_that_cannot_be_fused_stand_alone():
    pooled_twice = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
    assert kinds(pooled_twice, (1, 12, 12)) == [CONV, MAX_POOL, RELU, TO_CHANNELS_FIRST]
    averaged = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    assert kinds(averaged, (1, 12, 12)) == [CONV, AVERAGE_POOL, DENSE]
    assert kinds(nn.Sequential(nn.ReLU(), nn.Identity(), nn.Linear(3, 2)), (3,)) == [RELU, DENSE]


def test_the_body_ends_where_the_output_layer_begins():
    program, names = without_output(program_of(mlp((4,), 3, (5,)), (4,)))
    assert names == ("3.weight", "3.bias") and program.params == ("1.weight", "1.bias")
    assert program.num_outputs == 5 and len(program.layers) == 1
    with pytest.raises(Unsupported, match="last layer"):
        without_output(program_of(nn.Linear(4, 3), (4,)))


def test_a_residual_network_is_a_list_of_layers_that_name_what_they_read():
    layers = program_of(resnet((3, 8, 8), 3, 8, 4), (3, 8, 8)).layers
    block = [CONV, GROUP_NORM, CONV, GROUP_NORM]
    shrinking = [CONV, GROUP_NORM, SUBSAMPLE, CONV, GROUP_NORM]
    assert [layer.kind for layer in layers] == [CONV, GROUP_NORM, *block, *shrinking, *shrinking, AVERAGE_POOL, DENSE]
    assert [layer.source for layer in layers] == [INPUT, *range(5), 5, 6, 5, 7, 9, 10, 11, 10, 12, 14, 15, 16]
    assert {at: layer.second for at, layer in enumerate(layers) if layer.second != NONE} == {5: 1, 10: 8, 15: 13}
    assert all(layer.relu for layer in layers if layer.kind == GROUP_NORM)
    assert (layers[8].sh, layers[8].c, layers[8].oc) == (2, 16, 32)


def test_a_projected_shortcut_is_added_where_it_is_normed():
    layers = program_of(resnet((3, 8, 8), 3, 34, None), (3, 8, 8)).layers
    projections = [at for at, layer in enumerate(layers) if layer.kind == CONV and layer.kh == 1]
    assert len(projections) == 3
    for at in projections:
        assert layers[at].sh == 2 and layers[at + 1].second == at - 1 and layers[at + 1].relu


def test_what_two_layers_read_is_given_as_it_is():
    """Before an activation, too: no later step may become a part of the layer that gives it."""
    module = Applied(lambda x: x + F.relu(x))
    layers = program_of(module, (4,)).layers
    assert [(layer.kind, layer.relu, layer.source, layer.second) for layer in layers] == [
        (DENSE, 0, INPUT, NONE), (RELU, 0, 0, NONE), (ADD, 0, 0, 1),
    ]  # fmt: skip
    with_input = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert program_of(Plus(with_input), (4,)).layers[-1].second == INPUT


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), "it has a BatchNorm1d"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), (4,), "it has a Dropout"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()), (4,), "it has a GELU"),
        (lambda: nn.LSTM(4, 2), (4,), "cannot be traced|LSTM"),
        (lambda: nn.Conv2d(2, 2, 3, groups=2), (2, 8, 8), "groups"),
        (lambda: nn.Conv2d(2, 2, 3, dilation=2), (2, 8, 8), "dilation"),
        (lambda: nn.Conv2d(2, 2, 3, padding="same"), (2, 8, 8), "padding='same'"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 8, 8), "special padding"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2, padding=1), nn.Flatten()), (1, 8, 8), "max pooling"),
        (lambda: nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Flatten()), (1, 8, 8), "average pooling"),
        (lambda: nn.Conv2d(1, 1, 3), (1, 8, 8), "not a vector"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 9), nn.Flatten()), (1, 8, 8), "smaller than its kernels"),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.Flatten()), (1, 8, 8), "last axis of an image"),
        (lambda: nn.Linear(5, 2), (4,), "5 inputs would get 4"),
        (lambda: nn.EmbeddingBag(9, 2, mode="sum"), (4,), "more to it than a mean"),
        (lambda: nn.Sequential(nn.ReLU(), nn.EmbeddingBag(9, 2)), (4,), "something else than its input"),
        (lambda: nn.Linear(4, 2).double(), (4,), "float64"),
        (lambda: nn.Linear(4, 2), (4, 4), "neither vectors nor images"),
        (lambda: Applied(lambda x: x + 1), (4,), "adds something else"),
        (lambda: Applied(lambda x: torch.add(x, x, alpha=2)), (4,), "adds something else"),
        (lambda: Applied(lambda x: x * x.relu()), (4,), "it has a mul of several"),
        (lambda: Applied(lambda x: x.mean(1)), (4,), "mean over something else"),
        (lambda: Applied(lambda x: x[:, ::2]), (4,), r"index other than x\[:, :, ::s, ::s\]"),
        (lambda: Applied(lambda x: F.pad(x, (0, 1))), (4,), "padding of something else"),
        (lambda: Applied(lambda x: (x, x.relu())), (4,), "something else than one tensor"),
        (lambda: nn.LayerNorm((2, 8, 8)), (2, 8, 8), "LayerNorm of something else"),
        (lambda: Applied(lambda x: x if x.sum() > 0 else -x), (4,), "cannot be traced"),
        (Twice, (4,), "used twice"),
        (lambda: Applied(lambda x: x, unused=nn.Linear(2, 2)), (4,), "does not use unused.weight"),
    ],
)
def test_anything_else_is_left_to_the_general_ways_with_the_reason(module, shape, why):
    with pytest.raises(Unsupported, match=why):
        program_of(module(), shape)
