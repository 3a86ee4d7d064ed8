"""Residual networks in the kernels against PyTorch, both measured by their distance from float64."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmoe.models.resnet import ResNet, resnet
from kernel_results import kernel_of, results
from smooth_residual import SmoothResidual

# How much farther from float64 than PyTorch's own float32 the kernels may be, over several draws; and so many roundings
# of the numbers themselves beyond that, where PyTorch happens to be exact.
FACTOR = 4.0
ROUNDINGS = 8.0
EPSILON = torch.finfo(torch.float32).eps
NOT_FINITE = [math.nan, math.inf, -math.inf]


def assert_no_farther_than_torch(module, shape, batch, seed):
    """For modules without kinks."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    kernel, params = kernel_of(module, shape)
    wide = copy.deepcopy(module).double()
    of_wide = [dict(wide.named_parameters())[name] for name in kernel.program.params]
    wrong, allowed, size = Counter(), Counter(), Counter()
    for _ in range(3):
        x = torch.randn(batch, *shape, generator=generator)
        direction = torch.randn(batch, kernel.program.num_outputs, generator=generator)
        native = results(lambda x: kernel(params, x), params, x, direction)
        single, exact = results(module, params, x, direction), results(wide, of_wide, x.double(), direction)
        for label, ours, theirs, truth in zip(
            ["scores", *kernel.program.params, "input"], native, single, exact, strict=True
        ):
            assert ours.shape == truth.shape
            wrong[label] += (ours.double() - truth).square().sum().item()
            allowed[label] += (theirs.double() - truth).square().sum().item()
            size[label] += truth.square().sum().item()
    for label in wrong:
        ours, theirs, norm = (math.sqrt(total[label]) for total in (wrong, allowed, size))
        largest = math.sqrt(max(size.values()))  # a gradient that cancels is as wrong as what it is made of
        assert ours <= FACTOR * theirs + ROUNDINGS * EPSILON * (norm + 0.01 * largest), (
            f"{label}: {ours:.3g} against {theirs:.3g} of {norm:.3g}"
        )


@settings(max_examples=40)
@given(
    channels=st.sampled_from([1, 3, 16, 18, 32]),
    added=st.sampled_from([0, 2, 16, 30]),
    side=st.tuples(st.integers(5, 11), st.integers(5, 11)),
    stride=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    shortcut=st.sampled_from(["pad", "convolve"]),
    bias=st.booleans(),
    batch=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_blocks_of_any_shape_are_as_near_to_the_truth_as_pytorch(
    channels, added, side, stride, groups, shortcut, bias, batch, seed
):
    shape, width = (channels, *side), -(-(channels + added) // groups) * groups
    assert_no_farther_than_torch(SmoothResidual(shape, 3, width, stride, groups, shortcut, bias), shape, batch, seed)


@settings(max_examples=40)
@given(
    channels=st.sampled_from([3, 16, 32]),
    outputs=st.sampled_from([16, 17, 32, 48]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    side=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    bias=st.booleans(),
    batch=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_convolutions_without_pooling_are_as_near_to_the_truth_as_pytorch(
    channels, outputs, kernel, stride, padding, side, bias, batch, seed
):
    conv = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=bias)
    module = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh(), nn.Linear(outputs, 2))
    assert_no_farther_than_torch(module, (channels, *side), batch, seed)


class Several(nn.Module):
    """A convolution whose output a norm, the sum with it and a later layer read; and an input that is read twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        y = self.conv(x)
        z = torch.tanh(self.norm(y) + y) + y
        return self.head((self.other(torch.tanh(z + z)) + x).mean((2, 3)))


def test_what_several_layers_read_gets_a_gradient_from_each():
    assert_no_farther_than_torch(Several(), (16, 5, 6), batch=3, seed=0)


def transformed(matrix, tensor):
    """matrix tensor matrix^T over the last two axes."""
    return matrix @ tensor @ matrix.T


@pytest.mark.parametrize(("channels", "side", "spread"), [(16, 9, 0.0), (32, 8, 0.0), (64, 8, 3.0), (32, 5, 6.0)])
def test_a_winograd_convolution_keeps_its_error_bound_in_every_pixel(channels, side, spread):
    """|error| <= (channels + 12) roundings of |A^T| (|G| |g| |G^T| * |B^T| |d| |B|) |A|: what is really added up.

    The three transforms round at most 4 times each, the sum over channels once per channel.
    Numbers of very different sizes (`spread`, in powers of ten) are the hard case.
    """
    generator = torch.Generator().manual_seed(channels)

    def draw(*size):
        return torch.randn(size, generator=generator) * 10 ** (spread * torch.rand(size, generator=generator))

    conv, x = nn.Conv2d(channels, 32, 3, padding=1, bias=False), draw(3, channels, side, side)
    conv.weight.data = draw(32, channels, 3, 3)
    kernel, params = kernel_of(nn.Sequential(conv, nn.Flatten()), (channels, side, side))
    ours = kernel(params, x).view(3, 32, side, side).double()
    exact = F.conv2d(x.double(), conv.weight.double(), padding=1)

    of_input = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]).double().abs()
    of_weight = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]).double().abs()
    of_output = torch.tensor([[1, 1, 1, 0], [0, 1, -1, -1]]).double().abs()
    even = side + side % 2
    tiles = F.pad(x.double().abs(), (1, 1 + even - side, 1, 1 + even - side)).unfold(2, 4, 2).unfold(3, 4, 2)
    points = torch.einsum(
        "ncijpq,ocpq->noijpq", transformed(of_input, tiles), transformed(of_weight, conv.weight.detach().double().abs())
    )
    bound = transformed(of_output, points).transpose(3, 4).reshape(3, 32, even, even)[..., :side, :side]
    assert ((ours - exact).abs() <= (channels + 12) * EPSILON * bound).all()


@pytest.mark.parametrize(("depth", "shape"), [(8, (3, 32, 32)), (20, (3, 16, 16)), (8, (1, 9, 7)), (34, (3, 4, 4))])
def test_the_residual_networks_of_the_papers_give_the_scores_of_pytorch(depth, shape):
    """Their gradients jump at the kinks of ReLU; those of smooth blocks are compared above."""
    torch.manual_seed(0)
    module, x = resnet(shape, 10, depth, 4), torch.randn(6, *shape)
    kernel, params = kernel_of(module, shape)
    exact = copy.deepcopy(module).double()(x.double())
    ours, theirs = ((scores.double() - exact).norm().item() for scores in (kernel(params, x), module(x)))
    assert ours <= FACTOR * theirs


@pytest.mark.parametrize("shortcut", ["pad", "convolve"])
def test_gradients_of_a_residual_network_are_those_of_pytorch(shortcut):
    torch.manual_seed(1)
    module, x = ResNet((3, 8, 8), 4, (2, 1), (16, 32), 4, shortcut), torch.randn(5, 3, 8, 8)
    kernel, params = kernel_of(module, (3, 8, 8))
    direction = torch.randn(5, 4)
    ours, theirs = (results(net, params, x, direction) for net in (lambda x: kernel(params, x), module))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("place", ["input", "stem.0.weight", "stages.0.second.weight", "stages.1.first_norm.weight"])
def test_where_pytorch_is_not_finite_neither_are_we(value, place):
    torch.manual_seed(0)
    module, x = ResNet((3, 6, 6), 3, (1, 1), (16, 32), 4, "pad"), torch.randn(2, 3, 6, 6)
    target = x if place == "input" else dict(module.named_parameters())[place]
    with torch.no_grad():
        target.view(-1)[5] = value
    kernel, params = kernel_of(module, (3, 6, 6))
    direction = torch.randn(2, 3)
    ours, theirs = (results(net, params, x, direction) for net in (lambda x: kernel(params, x), module))
    assert not all(tensor.isfinite().all() for tensor in theirs)
    for label, one, other in zip(["scores", *kernel.program.params, "input"], ours, theirs, strict=True):
        assert not (one.isfinite() & ~other.isfinite()).any(), label


@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_example_that_is_not_finite_leaves_the_others_alone(value):
    """Blocks of tiles and of pixels go across examples."""
    torch.manual_seed(0)
    module, x = ResNet((3, 6, 6), 3, (1, 1), (16, 32), 4, "pad"), torch.randn(4, 3, 6, 6)
    kernel, params = kernel_of(module, (3, 6, 6))
    before = kernel(params, x)
    x[1, 0, 2, 3] = value
    after = kernel(params, x)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]]) and not after[1].isfinite().all()


def test_an_example_has_the_same_bits_in_every_batch():
    torch.manual_seed(0)
    module, x = resnet((3, 12, 12), 5, 8, 4), torch.randn(37, 3, 12, 12)
    kernel, params = kernel_of(module, (3, 12, 12))
    with torch.no_grad():
        together, alone = kernel(params, x), torch.cat([kernel(params, one) for one in x.split(1)])
        again = kernel(params, x)
    assert torch.equal(together, alone) and torch.equal(together, again)
