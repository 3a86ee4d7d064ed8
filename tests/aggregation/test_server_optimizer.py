import math

import pytest
import torch
from pydantic import ValidationError

from fedmoe import trees
from fedmoe.aggregation.server_optimizer import Moments, ServerOptimizer, init_moments, server_step


def random_tensors(seed):
    rng = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(3, 2, generator=rng), "bias": torch.randn((), generator=rng)}


def run(optimizer, params, changes):
    moments = init_moments(params)
    for change in changes:
        params, moments = server_step(optimizer, params, change, moments)
    return params, moments


def run_torch(make, params, changes):
    """The same steps by torch.optim, whose gradient is minus the change."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    optimizer = make(leaves.values())
    for change in changes:
        for name, leaf in leaves.items():
            leaf.grad = -change[name]
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


CHANGES = [random_tensors(seed) for seed in range(1, 6)]


def test_sgd_with_its_default_rate_adds_the_change_to_the_bit():
    params = random_tensors(0)
    stepped, moments = server_step(ServerOptimizer(), params, CHANGES[0], init_moments(params))
    assert all(torch.equal(stepped[name], params[name] + CHANGES[0][name]) for name in params)
    assert moments.step == 1


def test_sgd_with_momentum_is_that_of_torch():
    params = random_tensors(0)
    stepped, _ = run(ServerOptimizer(learning_rate=0.3, momentum=0.9), params, CHANGES)
    expected = run_torch(lambda leaves: torch.optim.SGD(leaves, lr=0.3, momentum=0.9), params, CHANGES)
    torch.testing.assert_close(stepped, expected)


@pytest.mark.parametrize("rate", [None, 0.05])
def test_adam_is_that_of_torch(rate):
    params = random_tensors(0)
    stepped, moments = run(ServerOptimizer("adam", rate), params, CHANGES)
    options = {} if rate is None else {"lr": rate}  # without a rate: the default of both
    expected = run_torch(lambda leaves: torch.optim.Adam(leaves, **options), params, CHANGES)
    torch.testing.assert_close(stepped, expected)
    assert moments.step == len(CHANGES)


def test_adam_reads_its_betas_and_epsilon():
    params = random_tensors(0)
    stepped, _ = run(ServerOptimizer("adam", 0.1, beta1=0.5, beta2=0.7, epsilon=0.2), params, CHANGES)
    expected = run_torch(lambda ls: torch.optim.Adam(ls, lr=0.1, betas=(0.5, 0.7), eps=0.2), params, CHANGES)
    torch.testing.assert_close(stepped, expected)


def test_yogi_by_hand():
    """Two steps on one number, changes 2 and then 1: v grows by the square below it and shrinks by one below v."""
    beta1, beta2, rate, epsilon = 0.9, 0.8, 0.1, 0.5
    optimizer = ServerOptimizer("yogi", rate, beta1=beta1, beta2=beta2, epsilon=epsilon)
    first_v = 0.2 * 4  # 0 < 4: + (1 - beta2) 4
    first_m = 0.1 * 2
    after_first = 1 + rate * (first_m / 0.1) / (math.sqrt(first_v / 0.2) + epsilon)
    second_v = first_v + 0.2 * 1  # 0.8 < 1
    second_m = 0.9 * first_m + 0.1 * 1
    after_second = after_first + rate * (second_m / (1 - 0.81)) / (math.sqrt(second_v / (1 - 0.64)) + epsilon)
    third_v = second_v - 0.2 * 0.25  # 1.0 > 0.25: here Adam would give 0.8 + 0.05

    changes = [{"w": torch.tensor(value)} for value in (2.0, 1.0, 0.5)]
    params = {"w": torch.tensor(1.0)}
    assert run(optimizer, params, changes[:1])[0]["w"].item() == pytest.approx(after_first)
    assert run(optimizer, params, changes[:2])[0]["w"].item() == pytest.approx(after_second)
    assert run(optimizer, params, changes)[1].square["w"].item() == pytest.approx(third_v)


@pytest.mark.parametrize("name", ["sgd", "adam", "yogi"])
def test_arguments_are_left_as_they_were(name):
    params, change = random_tensors(0), random_tensors(1)
    moments = Moments(random_tensors(2), trees.tree_map(torch.abs, random_tensors(3)), torch.tensor(4))
    before = trees.tree_map(torch.clone, (params, change, moments))
    server_step(ServerOptimizer(name, momentum=0.5), params, change, moments)
    torch.testing.assert_close((params, change, moments), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "bad", [{"name": "rmsprop"}, {"learning_rate": 0.0}, {"beta1": 1.0}, {"epsilon": -1.0}, {"lr": 1.0}]
)
def test_settings_out_of_range_are_errors(bad):
    with pytest.raises(ValidationError):
        ServerOptimizer(**bad)
