"""The gradient of a group's mean loss: for one client by autograd, for a cohort by ``vmap(grad)``."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedmoe.errors import ConfigError
from fedmoe.training.flat import Layout
from fedmoe.training.inference import Batch
from fedmoe.vocabulary import Tensors, Tree

Loss = Callable[[dict[str, Tree], Tree, Batch], Tensor]
BatchTerm = Callable[[dict[str, Tree], Tree, Batch, Tensor], Tensor] | None


def gradient_of_one(
    name: str,
    loss: Loss,
    batch_term: BatchTerm,
    layouts: Mapping[str, Layout],
    point: dict[str, Tensor],
    frozen: Tree,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """(loss (1,), gradient (1, P)) of the only client in `point`."""
    vectors = {group: flat[0] for group, flat in point.items()}
    vectors[name] = vectors[name].detach().requires_grad_()
    trainable = {group: layouts[group].unpack(vector) for group, vector in vectors.items()}
    value = loss(trainable, frozen, batch).mean()
    if batch_term:
        value = value + batch_term(trainable, frozen, batch, torch.ones(len(batch), dtype=torch.bool))
    (grad,) = torch.autograd.grad(value, vectors[name])
    return value.detach()[None], grad[None]


def gradients_of_many(
    name: str,
    loss: Loss,
    batch_term: BatchTerm,
    layouts: Mapping[str, Layout],
    point: dict[str, Tensor],
    frozen: Tree,
    batches: Batch,
    real_RB: Tensor,
) -> tuple[Tensor, Tensor]:
    """(losses (R,), gradients (R, P)); padded rows of a batch count for nothing."""

    def mean_loss(
        own: Tensor, everyone: dict[str, Tensor], kept: Tree, parts: tuple[Tensor, Tensor, Tensors], real: Tensor
    ) -> Tensor:
        vectors = {**everyone, name: own}
        trainable = {group: layouts[group].unpack(vector) for group, vector in vectors.items()}
        batch = Batch(*parts, training=True)
        value = (loss(trainable, kept, batch) * real).sum() / real.sum()
        return value + batch_term(trainable, kept, batch, real) if batch_term else value

    parts = (batches.x, batches.y, batches.extra)
    try:
        grads, losses = vmap(grad_and_value(mean_loss))(point[name], point, frozen, parts, real_RB)
    except RuntimeError as error:
        raise ConfigError(
            f"these clients cannot be trained stacked: {error}. Set engine.way = 'looped' to train them one at a time."
        ) from error
    return losses.detach(), grads.detach()
