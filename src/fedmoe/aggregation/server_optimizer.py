"""The server's optimizer of generalised FedAvg: the mean change of the clients taken as a step's direction.

Reddi et al., "Adaptive federated optimization" (2021), Algorithm 2: the weighted mean of (client - server) is minus a
pseudo-gradient. SGD with rate 1 is plain averaging. Adam is that of `torch.optim`, corrected for its start from zero;
their listing leaves the correction out and starts the second moment at a constant instead. Yogi (Zaheer et al. 2018)
is the same step with another second moment, so it is corrected likewise.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.setting_types import PositiveFloat

Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]

DEFAULT_RATES = {"sgd": 1.0, "adam": 1e-3, "yogi": 1e-2}  # averaging; torch.optim's; Zaheer et al.


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerOptimizer:
    """`momentum` counts for SGD; `beta1`, `beta2` and `epsilon` for Adam and Yogi."""

    name: Literal["sgd", "adam", "yogi"] = "sgd"
    learning_rate: PositiveFloat | None = None  # default: 1 for SGD, 0.001 for Adam, 0.01 for Yogi
    momentum: Decay = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: PositiveFloat = 1e-8

    @property
    def rate(self) -> float:
        return DEFAULT_RATES[self.name] if self.learning_rate is None else self.learning_rate


class Moments(NamedTuple):
    mean: Tensors  # m
    square: Tensors  # v
    step: Tensor  # steps taken so far


def init_moments(params: Tensors) -> Moments:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    return Moments(zeros, zeros, torch.tensor(0))


def server_step(
    optimizer: ServerOptimizer, params: Tensors, change: Tensors, moments: Moments
) -> tuple[Tensors, Moments]:
    """Move `params` along `change`, the weighted mean of (client - server). Nothing is changed in place."""
    if optimizer.name == "sgd":
        mean = {name: optimizer.momentum * moments.mean[name] + change[name] for name in params}
        stepped = {name: params[name] + optimizer.rate * mean[name] for name in params}
        return stepped, moments._replace(mean=mean, step=moments.step + 1)
    second_moment = adam_square if optimizer.name == "adam" else yogi_square
    mean = {name: moments.mean[name].lerp(change[name], 1 - optimizer.beta1) for name in params}
    square = {name: second_moment(moments.square[name], change[name] ** 2, optimizer.beta2) for name in params}
    count = int(moments.step) + 1
    rate = optimizer.rate / (1 - optimizer.beta1**count)
    stepped = {}
    for name in params:
        scale = (square[name] / (1 - optimizer.beta2**count)).sqrt() + optimizer.epsilon
        stepped[name] = params[name] + rate * mean[name] / scale
    return stepped, Moments(mean, square, moments.step + 1)


def adam_square(square: Tensor, latest: Tensor, beta2: float) -> Tensor:
    """v <- beta2 v + (1 - beta2) latest"""
    return square.lerp(latest, 1 - beta2)


def yogi_square(square: Tensor, latest: Tensor, beta2: float) -> Tensor:
    """v <- v - (1 - beta2) sign(v - latest) latest: it forgets at a pace that `latest` sets, however large v is."""
    return square - (1 - beta2) * torch.sign(square - latest) * latest
