"""The gradient of a group's mean loss: for one client by autograd, for a cohort through ``vmap``."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import vmap

from fedmoe import trees
from fedmoe.core_types import Tensors, Tree
from fedmoe.errors import ConfigError, RunError
from fedmoe.training.batch import Batch, BatchTerm, Loss, Trainable
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.devices import computing_on
from fedmoe.training.flat import Layout


def gradient_of_one(
    loss: Loss, batch_term: BatchTerm | None, own: Tree, trainable: Trainable, frozen: Tree, batch: Batch, out: Tensor
) -> Tensor:
    """The loss (1,) of one client; its gradient by the leaves of `own` goes into `out` (1, P)."""
    value = loss(trainable, frozen, batch).mean()
    if batch_term:
        value = value + batch_term(trainable, frozen, batch, torch.ones(len(batch), dtype=torch.bool))
    leaves = trees.leaves(own)
    grads = iter(torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], materialize_grads=True))
    parts = [next(grads) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]
    torch.cat([part.reshape(1, -1) for part in parts], dim=1, out=out)
    return value.detach()[None]


def gradients_of_many(
    name: str,
    loss: Loss,
    batch_term: BatchTerm | None,
    layouts: Mapping[str, Layout],
    point: dict[str, Tensor],
    frozen: Tree,
    batches: Batch,
    real_RB: Tensor,
) -> tuple[Tensor, Tensor]:
    """(losses (R,), gradients (R, P)); padded rows of a batch count for nothing."""

    def mean_loss(
        own: Tensor, everyone: dict[str, Tensor], fixed: Tree, parts: tuple[Tensor, Tensor, Tensors], real: Tensor
    ) -> Tensor:
        vectors = {**everyone, name: own}
        trainable = {group: layouts[group].unpack(vector) for group, vector in vectors.items()}
        batch = Batch(*parts, training=True)
        value = (loss(trainable, fixed, batch) * real).sum() / real.sum()
        return value + batch_term(trainable, fixed, batch, real) if batch_term else value

    # Clients are independent, so the gradient of the summed loss holds each client's gradient in its own row; a plain
    # backward through the batched forward costs half of vmap(grad).
    own = point[name].detach().requires_grad_()
    parts = (batches.x, batches.y, batches.extra)
    device = own.device
    try:
        with computing_on(device):
            if isinstance(loss, ClassifierLoss) and loss.network.reads_cohorts and not batch_term:
                trainable_R = {group: layouts[group].unpack(flat) for group, flat in {**point, name: own}.items()}
                losses_R = (loss.cohort(trainable_R, frozen, batches) * real_RB).sum(1) / real_RB.sum(1)
            else:
                losses_R = vmap(mean_loss)(own, point, frozen, parts, real_RB)
            (grads_RP,) = torch.autograd.grad(losses_R.sum(), own)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the device {device.type!r} has not enough memory for {len(own)} clients at once: {error}. Set a smaller "
            "engine.cohort_size in a new run."
        ) from error
    except RuntimeError as error:
        elsewhere = "engine.device = 'cpu' and " if device.type != "cpu" else ""
        raise ConfigError(
            f"these clients cannot be trained batched: {error}. "
            f"Set {elsewhere}engine.backend = 'sequential' to train them one at a time."
        ) from error
    return losses_R.detach(), grads_RP
