"""SGD, momentum, Adam and AdamW on flat parameter vectors with a client axis.

Why not `torch.optim`: a client's parameters are one row of a (S, P) matrix here, so one elementwise step serves a
cohort and a single client alike, without the per-parameter Python of an Optimizer (a tenth of a small CNN's step) and
without importing `torch._dynamo` (1.4 s). Tests compare every step with `torch.optim`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmoe.core_types import Tensors


@dataclass(frozen=True)
class Sgd:
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0  # added to the gradient, as in torch.optim


@dataclass(frozen=True)
class Adam:
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False  # AdamW: weights shrink by themselves, and the moments see nothing of it


Optimizer = Sgd | Adam


def init_optimizer_state(optimizer: Optimizer, flat_SP: Tensor) -> Tensors:
    """Optimizers start afresh: zeros of the parameters' shape."""
    if isinstance(optimizer, Adam):
        return {name: torch.zeros_like(flat_SP) for name in ("mean", "square")}
    return {"velocity": torch.zeros_like(flat_SP)} if optimizer.momentum else {}


def descend(
    optimizer: Optimizer,
    flat_SP: Tensor,
    grad_SP: Tensor,
    state: Tensors,
    step: int | Tensor,
    rate: float | Tensor,
    untrained_P: Tensor | None = None,
) -> None:
    """One step, in place on `flat_SP` and `state`. `step`, from 1, and `rate` are numbers, or (S, 1) where clients
    differ.

    Weights that are `untrained_P` (bool), whose gradient is zero, do not decay either.
    """
    if optimizer.weight_decay:
        grad_SP = _decay(optimizer, flat_SP, grad_SP, rate, untrained_P)
    if isinstance(optimizer, Adam) and isinstance(step, int) and isinstance(rate, float) and flat_SP.is_cpu:
        _fused_adam(optimizer, flat_SP, grad_SP, state, step, rate)
        return
    if isinstance(optimizer, Adam):
        state["mean"].lerp_(grad_SP, 1 - optimizer.beta1)
        state["square"].mul_(optimizer.beta2).addcmul_(grad_SP, grad_SP, value=1 - optimizer.beta2)
        scale = (state["square"] / (1 - optimizer.beta2**step)).sqrt_().add_(optimizer.epsilon)
        flat_SP.sub_(state["mean"].div(scale).mul_(rate / (1 - optimizer.beta1**step)))
        return
    if optimizer.momentum:
        grad_SP = state["velocity"].mul_(optimizer.momentum).add_(grad_SP)
    _move_back(flat_SP, grad_SP, rate)


def _move_back(flat_SP: Tensor, direction_SP: Tensor, length: float | Tensor) -> None:
    if isinstance(length, Tensor):
        flat_SP.sub_(direction_SP * length)
    else:
        flat_SP.sub_(direction_SP, alpha=length)


def _decay(
    optimizer: Optimizer, flat_SP: Tensor, grad_SP: Tensor, rate: float | Tensor, untrained_P: Tensor | None
) -> Tensor:
    """The gradient with the decay in it; a decoupled one is taken off the weights at once."""
    decaying_SP = flat_SP if untrained_P is None else flat_SP.masked_fill(untrained_P, 0)
    if isinstance(optimizer, Adam) and optimizer.decoupled:
        _move_back(flat_SP, decaying_SP, rate * optimizer.weight_decay)
        return grad_SP
    return grad_SP.add(decaying_SP, alpha=optimizer.weight_decay)


def _fused_adam(optimizer: Adam, flat_SP: Tensor, grad_SP: Tensor, state: Tensors, step: int, rate: float) -> None:
    """The kernel behind ``torch.optim.Adam(fused=True)``: one pass over memory instead of six.

    On the CPU alone: elsewhere it differs from version to version in what it takes.
    """
    torch._fused_adam_(
        [flat_SP],
        [grad_SP],
        [state["mean"]],
        [state["square"]],
        [],
        [torch.tensor(float(step))],
        lr=rate,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        weight_decay=0.0,  # `_decay` has done it
        eps=optimizer.epsilon,
        amsgrad=False,
        maximize=False,
    )
