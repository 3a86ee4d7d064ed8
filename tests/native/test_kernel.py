"""The kernels against PyTorch, both measured by their distance from float64."""

import copy
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from fedmoe.errors import DataError, MessageError
from fedmoe.models.images import LeNet, SmallCNN, mlp
from fedmoe.native.layers import Unsupported
from fedmoe.native.program import program_of
from kernel_results import kernel_of, results

# How much farther from float64 than PyTorch's own float32 the kernels may be. Both sum the same products in different
# orders, so neither is always the nearer one.
FACTOR = 4.0
# Beyond that, so many roundings of the sum of absolute values: a sum may cancel, so that its own size bounds nothing.
ROUNDINGS = 4.0
EPSILON = torch.finfo(torch.float32).eps


class PlusOne(nn.Module):
    def forward(self, x):
        return x + 1


def of_absolute_values(module):
    """The same network with every weight's absolute value, and with each activation and maximum replaced by a bound.

    Of absolute inputs it computes the sum of the absolute values of all that is added up in the module's scores, or
    more; and so do its gradients: |relu(z)|, |tanh(z)| <= |z|, sigmoid(z) <= 1 + |z|, slopes <= 1, max <= sum.
    """
    bound = copy.deepcopy(module).double()
    for name, layer in list(bound.named_modules()):
        parent = bound.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, nn.ReLU | nn.Tanh):
            setattr(parent, name.rpartition(".")[2], nn.Identity())
        elif isinstance(layer, nn.Sigmoid):
            setattr(parent, name.rpartition(".")[2], PlusOne())
        elif isinstance(layer, nn.MaxPool2d):
            total = nn.AvgPool2d(layer.kernel_size, layer.stride, divisor_override=1)
            setattr(parent, name.rpartition(".")[2], total)
    with torch.no_grad():
        for parameter in bound.parameters():
            parameter.abs_()
    return bound


def is_smooth_at(wide, x):
    """Whether no unit is within rounding of a kink: there a gradient jumps, and neither side of the jump is wrong."""
    margins = []

    def note_relu(_layer, inputs):
        z = inputs[0].abs()
        margins.append((z.min() / z.max().clamp_min(1e-30)).item())

    def note_pool(layer, inputs):
        size, step = ((v, v) if isinstance(v, int) else v for v in (layer.kernel_size, layer.stride))
        windows = inputs[0].unfold(2, size[0], step[0]).unfold(3, size[1], step[1]).flatten(4)
        first, second = windows.topk(2, dim=-1).values.unbind(-1)
        apart = (first - second)[first != 0]  # equal zeros have passed a ReLU: no gradient passes them
        margins.append((apart.min() / inputs[0].abs().max()).item() if apart.numel() else 1.0)

    hooks = [layer.register_forward_pre_hook(note_relu) for layer in wide.modules() if isinstance(layer, nn.ReLU)]
    pools = (layer for layer in wide.modules() if isinstance(layer, nn.MaxPool2d))
    hooks += [pool.register_forward_pre_hook(note_pool) for pool in pools]
    wide(x)
    for hook in hooks:
        hook.remove()
    return min(margins, default=1.0) > 16 * EPSILON


def assert_no_farther_than_torch(module, shape, batch, seed=0):
    """Over several draws: a single sum may be right by luck."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    kernel, params = kernel_of(module, shape)
    names = kernel.program.params
    wide, bound = copy.deepcopy(module).double(), of_absolute_values(module)
    of_wide, of_bound = ([dict(net.named_parameters())[name] for name in names] for net in (wide, bound))
    wrong, allowed, size = Counter(), Counter(), Counter()
    for draw in range(4):
        generator.manual_seed(seed + draw)
        x = torch.randn(batch, *shape, generator=generator)
        direction = torch.randn(batch, kernel.program.num_outputs, generator=generator)
        native = results(lambda x: kernel(params, x), params, x, direction)
        single = results(module, params, x, direction)
        exact = results(wide, of_wide, x.double(), direction)
        sizes = results(bound, of_bound, x.double().abs(), direction.abs())
        compared = ["scores", *names, "input"] if is_smooth_at(wide, x.double()) else ["scores"]
        for label, ours, theirs, truth, most in zip(compared, native, single, exact, sizes, strict=False):
            assert ours.shape == truth.shape
            wrong[label] += (ours.double() - truth).square().sum().item()
            allowed[label] += (theirs.double() - truth).square().sum().item()
            size[label] += most.square().sum().item()
    for label in wrong:
        ours, theirs, absolute = (math.sqrt(total[label]) for total in (wrong, allowed, size))
        assert ours <= FACTOR * theirs + ROUNDINGS * EPSILON * absolute, (
            f"{label}: {ours:.3g} against {theirs:.3g}, of absolute values {absolute:.3g}"
        )


small = st.integers(1, 3)


@st.composite
def conv_nets(draw):
    channels, out = draw(st.integers(1, 5)), draw(st.integers(1, 35))
    kernel, stride = (draw(st.integers(1, 6)), draw(st.integers(1, 6))), (draw(small), draw(small))
    padding = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    side = [draw(st.integers(max(kernel) + 3, 15)) for _ in range(2)]
    layers = [nn.Conv2d(channels, out, kernel, stride, padding, bias=draw(st.booleans()))]
    size = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(side, padding, kernel, stride, strict=True)]
    extra = [nn.ReLU()] if draw(st.booleans()) else []
    if min(size) >= 2 and draw(st.booleans()):
        pool = draw(
            st.sampled_from([nn.MaxPool2d(2), nn.MaxPool2d(2, 1), nn.AvgPool2d(2), nn.MaxPool2d((1, 2), (2, 1))])
        )
        extra.append(pool)
        window, step = (pool.kernel_size, pool.stride)
        window, step = ((v, v) if isinstance(v, int) else v for v in (window, step))
        size = [(n - k) // s + 1 for n, k, s in zip(size, window, step, strict=True)]
        extra = extra if draw(st.booleans()) else extra[::-1]
    layers += [*extra, nn.Flatten(), nn.Linear(out * size[0] * size[1], draw(st.integers(1, 20)))]
    return nn.Sequential(*layers), (channels, *side)


@settings(max_examples=60)
@given(net=conv_nets(), batch=st.integers(1, 11), seed=st.integers(0, 10**6))
def test_convolutions_of_any_shape_are_as_near_to_the_truth_as_pytorch(net, batch, seed):
    assert_no_farther_than_torch(*net, batch, seed)


@settings(max_examples=60)
@example(widths=[1, 18], activation=nn.ReLU, bias=True, batch=1, seed=1)  # whose sums cancel
@example(widths=[1, 18], activation=nn.ReLU, bias=False, batch=1, seed=1)
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    activation=st.sampled_from([nn.ReLU, nn.Sigmoid, nn.Tanh]),
    bias=st.booleans(),
    batch=st.integers(1, 13),
    seed=st.integers(0, 10**6),
)
def test_dense_chains_of_any_shape_are_as_near_to_the_truth_as_pytorch(widths, activation, bias, batch, seed):
    layers = [nn.Linear(7, widths[0], bias=bias)]
    for width_in, width_out in itertools.pairwise(widths):
        layers += [activation(), nn.Linear(width_in, width_out, bias=bias)]
    module = nn.Sequential(*layers, activation())
    assert_no_farther_than_torch(module, (7,), batch, seed)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: SmallCNN((3, 32, 32), 10), (3, 32, 32)),
        (lambda: LeNet((1, 28, 28), 10, (32, 64), (64,)), (1, 28, 28)),
        (lambda: mlp((1, 28, 28), 10, (200, 200)), (1, 28, 28)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)), (2, 9, 9)),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d(3), nn.Flatten()), (1, 9, 9)),
    ],
)  # fmt: skip
def test_the_networks_of_the_papers_are_as_near_to_the_truth_as_pytorch(module, shape):
    assert_no_farther_than_torch(module(), shape, batch=10)


def test_a_batch_of_none_has_no_scores_and_gradients_of_zero():
    module = mlp((4,), 3, (5,))
    kernel, params = kernel_of(module, (4,))
    scores = kernel(params, torch.zeros(0, 4))
    assert scores.shape == (0, 3)
    assert all(not grad.any() for grad in torch.autograd.grad(scores.sum(), params))


# Axes of clients and experts

MODULE, SHAPE = LeNet((2, 16, 16), 3, (3, 4), (5,)), (2, 16, 16)


def cohort(*lead):
    _, params = kernel_of(MODULE, SHAPE)
    generator = torch.Generator().manual_seed(1)
    return [0.2 * torch.randn(*lead, *p.shape, generator=generator) for p in params]


def test_every_item_of_a_cohort_is_computed_by_itself_to_the_bit():
    kernel, _ = kernel_of(MODULE, SHAPE)
    params, x = [p.requires_grad_() for p in cohort(3)], torch.randn(3, 6, *SHAPE)
    together = [kernel(params, x), *torch.autograd.grad(kernel(params, x).sum(), params)]
    for s in range(3):
        own = [p[s].detach().requires_grad_() for p in params]
        alone = [kernel(own, x[s]), *torch.autograd.grad(kernel(own, x[s]).sum(), own)]
        assert all(torch.equal(one[s], other) for one, other in zip(together, alone, strict=True))


def test_mapping_over_clients_and_experts_with_shared_examples_equals_a_loop():
    kernel, _ = kernel_of(MODULE, SHAPE)
    params, x = [p.requires_grad_() for p in cohort(2, 3)], torch.randn(2, 4, *SHAPE)
    mapped = vmap(lambda own, images: vmap(lambda one: kernel(one, images))(own))(params, x)
    grads = torch.autograd.grad(mapped.square().sum(), params)
    names = kernel.program.params
    for s in range(2):
        for k in range(3):
            own = {name: p[s, k].detach().requires_grad_() for name, p in zip(names, params, strict=True)}
            expected = functional_call(MODULE, own, (x[s],))
            torch.testing.assert_close(mapped[s, k], expected)
            for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), own.values()), strict=True):
                torch.testing.assert_close(ours[s, k], theirs, atol=1e-5, rtol=1e-4)


def test_gradients_per_example_come_from_the_same_kernels():
    kernel, params = kernel_of(MODULE, SHAPE)
    x, y = torch.randn(5, *SHAPE), torch.tensor([0, 1, 2, 0, 1])
    own = tuple(p.detach() for p in params)

    def loss(own, one, label):
        return F.cross_entropy(kernel(own, one[None]), label[None])

    per_example = vmap(grad(loss), (None, 0, 0))(own, x, y)
    for n in range(5):
        expected = torch.autograd.grad(F.cross_entropy(MODULE(x[n : n + 1]), y[n : n + 1]), params)
        for ours, theirs in zip(per_example, expected, strict=True):
            torch.testing.assert_close(ours[n], theirs, atol=1e-6, rtol=1e-4)


def test_parameters_and_images_with_odd_strides_are_read_right():
    kernel, params = kernel_of(MODULE, SHAPE)
    turned = [p.detach().transpose(-1, -2).contiguous().transpose(-1, -2) if p.dim() > 1 else p for p in params]
    x = torch.randn(4, 16, 16, 2).permute(0, 3, 1, 2)
    assert torch.equal(kernel(turned, x), kernel(params, x.contiguous()))


# NaN and infinity

NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def pattern(tensor):
    """Where NaN is, and where plus or minus infinity."""
    return [tensor.isnan().tolist(), (tensor == torch.inf).tolist(), (tensor == -torch.inf).tolist()]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("place", ["input", "first weight", "last weight", "bias"])
@pytest.mark.parametrize("pool", [True, False])
def test_nan_and_infinity_travel_as_in_pytorch(value, place, pool):
    torch.manual_seed(0)
    block = [nn.Conv2d(2, 3, 3), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
    module = nn.Sequential(*block, nn.Flatten(), nn.Linear(27 if pool else 108, 3))
    x = torch.randn(3, 2, 8, 8)
    target = {"input": x, "first weight": module[0].weight, "last weight": module[-1].weight, "bias": module[0].bias}
    with torch.no_grad():
        target[place].view(-1)[5 % target[place].numel()] = value
    kernel, params = kernel_of(module, (2, 8, 8))
    direction = torch.randn(3, 3)
    ours, theirs = (results(net, params, x, direction) for net in (lambda x: kernel(params, x), module))
    for label, one, other in zip(["scores", *kernel.program.params, "input"], ours, theirs, strict=True):
        assert pattern(one) == pattern(other), label


# Words


def bag_of_words():
    return nn.Sequential(nn.EmbeddingBag(7, 5, mode="mean"), nn.ReLU(), nn.Linear(5, 3))


def test_the_mean_of_embedded_words_and_its_gradient_are_those_of_pytorch():
    module = bag_of_words()
    kernel, params = kernel_of(module, (4,))
    words = torch.tensor([[0, 6, 6, 2], [1, 1, 1, 1]])
    scores, expected = kernel(params, words), module(words)
    torch.testing.assert_close(scores, expected)
    for ours, theirs in zip(
        torch.autograd.grad(scores.square().sum(), params),
        torch.autograd.grad(expected.square().sum(), params),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


# What the kernels would read past the end of


def test_words_without_a_row_examples_of_another_shape_and_foreign_parameters_are_refused():
    kernel, params = kernel_of(bag_of_words(), (4,))
    for word in (7, -1):
        with pytest.raises(DataError, match="the embedding has 7 rows"):
            kernel(params, torch.tensor([[0, 0, 0, word]]))
    with pytest.raises(DataError, match=r"shape \(4,\) are expected"):
        kernel(params, torch.zeros(2, 3, dtype=torch.int64))
    words = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(MessageError, match=r"0\.weight is float32 of shape \(7, 4\).*\(7, 5\).*of another model"):
        kernel([params[0][:, :4], *params[1:]], words)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(MessageError, match=r"0\.weight is \w+64|0\.weight is int32"):
            kernel([params[0].detach().to(dtype), *params[1:]], words)
    with pytest.raises(DataError, match=r"these are torch\.float32"):
        kernel(params, words.float())


def test_parameters_for_fewer_items_than_there_are_examples_for_are_refused():
    kernel, params = kernel_of(mlp((4,), 3, ()), (4,))
    with pytest.raises(MessageError, match=r"1\.weight is float32 of shape \(2, 3, 4\).*\(3, 3, 4\)"):
        kernel([p.expand(2, *p.shape) for p in params], torch.zeros(3, 5, 4))


def test_gradients_of_another_shape_or_dtype_are_refused():
    kernel, params = kernel_of(mlp((4,), 3, ()), (4,))
    scores, tape, images = kernel.forward(torch.zeros(2, 4), params, keep=True)
    for wrong in (torch.zeros(2, 2), torch.zeros(1, 3), torch.zeros(2, 3).double()):
        with pytest.raises(MessageError, match="the gradient by the scores"):
            kernel.backward(images, tape, wrong, params, input_too=False)
    with pytest.raises(MessageError, match="the tape"):
        kernel.backward(images, tape[:-1], torch.zeros_like(scores), params, input_too=False)


def test_an_embedding_with_more_rows_than_floats_count_is_left_to_pytorch():
    with torch.device("meta"):
        module = nn.Sequential(nn.EmbeddingBag(2**24 + 1, 1), nn.Linear(1, 2))
    with pytest.raises(Unsupported, match="more than float32 counts exactly"):
        program_of(module, (4,))
