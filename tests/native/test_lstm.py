"""Recurrent networks in the kernels against PyTorch, both measured by their distance from float64."""

import copy
import ctypes
import math
import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmoe.errors import DataError
from fedmoe.models.text import TextLSTM
from fedmoe.native import build
from fedmoe.native.layers import DENSE, LSTM, RELU, Unsupported
from fedmoe.native.program import program_of
from kernel_results import kernel_of

WORDS = 30
FACTOR = 4.0  # how much farther from float64 than PyTorch's own float32 the kernels may be
ROUNDINGS = 4.0  # beyond that, so many roundings of the largest entry: either may be right by luck
EPSILON = torch.finfo(torch.float32).eps


class Own(nn.Module):
    """The usual style, with what is read of the LSTM chosen by name."""

    def __init__(self, read, *, words=True, hidden=5, width=6, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width) if words else nn.Identity()
        self.lstm = nn.LSTM(width, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (1 + self.lstm.bidirectional), 3)
        self.read = read

    def forward(self, x):
        output, (states, _) = self.lstm(self.embedding(x))
        if self.read == "last output":
            return self.head(output[:, -1, :])
        if self.read == "mean":
            return self.head(output.mean(dim=1))
        return self.head(torch.cat((states[-2], states[-1]), 1) if self.lstm.bidirectional else states[-1])


def results(forward, params, x, direction):
    scores = forward(x)
    wanted = [*params, x] if x.is_floating_point() else params
    grads = torch.autograd.grad((scores * direction.to(scores.dtype)).sum(), wanted)
    return [scores.detach(), *grads]


def assert_no_farther_than_torch(module, shape, draw_x, seed):
    """Over several draws: a single sum may be right by luck."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    kernel, params = kernel_of(module, shape)
    wide = copy.deepcopy(module).double()
    of_wide = [dict(wide.named_parameters())[name] for name in kernel.program.params]
    wrong, allowed, size = Counter(), Counter(), Counter()
    for _ in range(4):
        x = draw_x(generator)
        direction = torch.randn(len(x), kernel.program.num_outputs, generator=generator)
        numbers = x.is_floating_point()
        ours = results(lambda x: kernel(params, x), params, x.requires_grad_(numbers), direction)
        theirs = results(module, params, x, direction)
        exact = results(wide, of_wide, x.detach().double().requires_grad_() if numbers else x, direction)
        labels = ["scores", *kernel.program.params, *(["input"] if numbers else [])]
        for label, one, other, truth in zip(labels, ours, theirs, exact, strict=True):
            assert one.shape == truth.shape
            wrong[label] += (one.double() - truth).square().sum().item()
            allowed[label] += (other.double() - truth).square().sum().item()
            size[label] += truth.abs().max().item() ** 2 * truth.numel()
    for label in wrong:
        ours, theirs, largest = (math.sqrt(total[label]) for total in (wrong, allowed, size))
        assert ours <= FACTOR * theirs + ROUNDINGS * EPSILON * largest, f"{label}: {ours:.3g} against {theirs:.3g}"


def draw_words(batch, length, *, gaps=True):
    """Texts of any length, some empty, with padding before, between and after."""

    def draw(generator):
        words = torch.randint(0 if gaps else 1, WORDS, (batch, length), generator=generator)
        lengths = torch.randint(0, length + 1, (batch, 1), generator=generator)
        words[torch.arange(length) >= lengths] = 0
        return torch.where(torch.rand(batch, 1, generator=generator) < 0.3, words.flip(1), words)

    return draw


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 40)),
    levels=st.integers(1, 2),
    both=st.booleans(),
    batch=st.integers(1, 15),
    seed=st.integers(0, 10**6),
)
def test_texts_of_any_lengths_are_as_near_to_the_truth_as_pytorch(sizes, levels, both, batch, seed):
    length, embedding, hidden = sizes
    module = TextLSTM(WORDS, 3, embedding, hidden, levels, both)
    assert_no_farther_than_torch(module, (length,), draw_words(batch, length), seed)


@settings(max_examples=40)
@given(
    read=st.sampled_from(["last output", "mean", "final states"]),
    words=st.booleans(),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)),
    options=st.fixed_dictionaries(
        {"num_layers": st.integers(1, 3), "bidirectional": st.booleans(), "bias": st.booleans()}
    ),
    batch=st.integers(1, 13),
    seed=st.integers(0, 10**6),
)
def test_own_modules_are_as_near_to_the_truth_as_pytorch(read, words, sizes, options, batch, seed):
    length, width, hidden = sizes
    module = Own(read, words=words, width=width, hidden=hidden, **options)
    if words:
        assert_no_farther_than_torch(module, (length,), draw_words(batch, length), seed)
    else:
        draw = lambda generator: torch.randn(batch, length, width, generator=generator)  # noqa: E731
        assert_no_farther_than_torch(module, (length, width), draw, seed)


def test_the_network_of_ag_news_is_as_near_to_the_truth_as_pytorch():
    assert_no_farther_than_torch(TextLSTM(WORDS, 4), (64,), draw_words(10, 64), seed=0)


def test_an_example_s_scores_are_the_same_bits_in_any_batch_and_every_time():
    kernel, params = kernel_of(TextLSTM(WORDS, 3, 20, 17), (12,))
    x = draw_words(40, 12)(torch.Generator().manual_seed(0))
    scores = kernel(params, x)
    assert torch.equal(scores, kernel(params, x))
    assert torch.equal(scores, torch.cat([kernel(params, x[n : n + 1]) for n in range(40)]))


def test_a_batch_of_none_has_no_scores_and_gradients_of_zero():
    kernel, params = kernel_of(TextLSTM(WORDS, 3, 4, 5), (6,))
    scores = kernel(params, torch.zeros(0, 6, dtype=torch.int64))
    assert scores.shape == (0, 3)
    assert not any(grad.any() for grad in torch.autograd.grad(scores.sum(), params))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["embedding.weight", "forwards.weight_ih_l0", "forwards.weight_hh_l0", "head.weight"])
def test_what_is_not_finite_in_pytorch_is_not_finite_here(place, value):
    torch.manual_seed(0)
    module = TextLSTM(WORDS, 3, 6, 20)
    x = draw_words(5, 7, gaps=False)(torch.Generator().manual_seed(1)).clamp_min(1)
    with torch.no_grad():
        module.get_parameter(place).view(-1)[6 * int(x[0, 0]) + 2 if place == "embedding.weight" else 5] = value
    kernel, params = kernel_of(module, (7,))
    direction = torch.randn(5, 3)
    ours, theirs = (results(net, params, x, direction) for net in (lambda x: kernel(params, x), module))
    for label, one, other in zip(["scores", *kernel.program.params], ours, theirs, strict=True):
        assert (one.isfinite() <= other.isfinite()).all(), label
        if label == "scores":
            assert one.isfinite().tolist() == other.isfinite().tolist()


SMOOTH = """
#include "smooth.h"
extern "C" void both(const float* x, float* s, float* t, long n) {
  for (long i = 0; i < n; i += fedmoe::LANES) {
    fedmoe::store(s + i, fedmoe::sigmoid(fedmoe::load<fedmoe::vec>(x + i)));
    fedmoe::store(t + i, fedmoe::hyperbolic_tangent(fedmoe::load<fedmoe::vec>(x + i)));
  }
}
"""


def test_sigmoid_and_tanh_are_within_three_units_in_the_last_place(tmp_path):
    source, target = tmp_path / "smooth.cpp", tmp_path / "smooth.so"
    source.write_text(SMOOTH)
    compiler = build._find_compiler(os.environ.get("CXX", ""))
    command = [compiler, *build.FLAGS, "-I", str(Path(build.__file__).parent), str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    near = np.linspace(-20, 20, 1 << 16)
    small = np.concatenate([sign * np.logspace(-30, 1, 1 << 14) for sign in (1, -1)])
    far = np.array([-np.inf, np.inf, -1e30, 1e30, -86.9, 86.9, 0.0, np.nan] * 4)
    x = np.concatenate([near, small, far]).astype(np.float32)
    sigmoid, tanh = np.empty_like(x), np.empty_like(x)
    places = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, sigmoid, tanh)]
    ctypes.CDLL(str(target)).both(*places, ctypes.c_long(len(x)))
    wide = np.where(np.abs(x) > 80, np.sign(x) * 80, x).astype(np.float64)  # else the truth overflows
    for found, truth in ((sigmoid, 1 / (1 + np.exp(-wide))), (tanh, np.tanh(wide))):
        units = np.abs(found - truth) / np.spacing(np.abs(truth).astype(np.float32))
        assert np.nanmax(np.where(np.abs(x) < 80, units, 0)) <= 3
        assert np.allclose(found, truth, atol=1e-30, equal_nan=True)


# What is recognised


def kinds(module, shape):
    return [layer.kind for layer in program_of(module, shape).layers]


def test_a_program_tells_what_it_reads():
    program = program_of(TextLSTM(WORDS, 3, 20, 16, layers=2), (12,))
    assert [layer.describe() for layer in program.layers] == [
        "embedding 20 + lstm 16 in both directions, 2 levels, final states -> 32",
        "dense -> 3",
    ]
    assert kinds(nn.Sequential(Own("mean", bidirectional=True), nn.ReLU()), (12,)) == [LSTM, DENSE]
    assert kinds(nn.Sequential(Own("mean"), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()), (12,)) == [LSTM, DENSE, DENSE]
    assert RELU not in kinds(Own("last output"), (12,))


class Subclass(TextLSTM):
    def forward(self, x):
        return super().forward(x).relu()


class OddRead(Own):
    def forward(self, x):
        output, (states, cells) = self.lstm(self.embedding(x))
        return self.head({"first step": output[:, 0], "cell": cells[-1], "two": output[:, -1] + states[-1]}[self.read])


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (lambda: Subclass(WORDS, 3), (5,), "cannot be traced"),
        (lambda: OddRead("first step"), (5,), "it has a"),
        (lambda: OddRead("cell"), (5,), "it has a"),
        (lambda: OddRead("two"), (5,), "it has a"),
        (lambda: Own("mean", num_layers=2, dropout=0.5), (5,), "dropout"),
        (lambda: Own("mean", words=False), (5,), "something else than its input"),
        (lambda: Own("mean"), (5, 6), "something else than its input"),
        (lambda: Own("mean", words=False), (5, 7), "6 inputs would get 7"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 2)), (5, 6), "nor for an LSTM"),
    ],
)
def test_anything_else_is_left_to_pytorch_with_the_reason(module, shape, why):
    with pytest.raises(Unsupported, match=why):
        program_of(module(), shape)


def test_words_without_a_row_are_refused():
    kernel, params = kernel_of(TextLSTM(WORDS, 3, 4, 5), (6,))
    for word in (WORDS, -1):
        with pytest.raises(DataError, match=f"the embedding has {WORDS} rows"):
            kernel(params, torch.full((1, 6), word))
    with pytest.raises(DataError, match="Give integers"):
        kernel(params, torch.zeros(1, 6))
