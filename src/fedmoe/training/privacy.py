"""DP-SGD inside the trainer (Abadi et al. 2016): gradients of single examples, clipped, summed, noised.

Batches are Poisson samples, empty ones included, and are never cut to fit; the sum is divided by the expected batch
size, which is public, and not by how many examples there happened to be. Padding counts for nothing.
Shape suffixes: R clients that take this step, B examples of a batch, M of a microbatch, P parameters of a group.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedmoe import trees
from fedmoe.core_types import ClientId, Tensors, Tree
from fedmoe.errors import ConfigError
from fedmoe.models.task import Classification
from fedmoe.native.kernel import Targets
from fedmoe.private_steps import Mechanism, PrivateSteps
from fedmoe.training.batch import Batch, Loss
from fedmoe.training.classifier import LOGIT_OFFSET, ClassifierLoss
from fedmoe.training.flat import Layout
from fedmoe.training.group import Group

DIVISOR_OF_ROUNDING = 1e-12  # a zero gradient has nothing to scale


def require_private_training(groups: Mapping[str, Group], *, stops_early: bool) -> None:
    """Refuse what would let a record count for more than its clipped gradient."""
    if len(groups) > 1:
        raise ConfigError(
            f"privacy is on, but this algorithm trains {len(groups)} groups of parameters together in what it sends "
            f"({', '.join(groups)}). Choose another algorithm, or leave [privacy] away."
        )
    (group,) = groups.values()
    if group.batch_term is not None:
        raise ConfigError("privacy is on, but the loss has a term of the whole batch, which no clipping bounds.")
    if stops_early:
        raise ConfigError("privacy is on, but what is sent would depend on a validation loss, which has no noise.")


def private_gradients(
    steps: PrivateSteps,
    clients: Sequence[ClientId],
    numbers: Sequence[int],
    sums_RP: Tensor,
    sensitivity: float,
) -> Tensor:
    """(sum of clipped gradients + noise) / expected batch size, of every client; `numbers` are the ledger's steps."""
    size = sums_RP.shape[1]
    noise = [steps.noise(c, number, size, sensitivity) for c, number in zip(clients, numbers, strict=True)]
    return (sums_RP + torch.stack(noise)) / steps.mechanism.expected_batch_size


def clipped_sums(
    name: str,
    loss: Loss,
    layouts: Mapping[str, Layout],
    point: dict[str, Tensor],
    frozen: Tree,
    batches: Batch,
    real_RB: Tensor,
    mechanism: Mechanism,
    untrained_P: Tensor | None = None,
) -> Tensor:
    """(R, P): microbatch by microbatch, so that memory does not grow with the batch.

    The native kernels hold one example's gradient at a time, whatever the batch.
    """
    if isinstance(loss, ClassifierLoss) and loss.network.native and not loss.score_offset and real_RB.numel():
        return _native_sums(loss, layouts[name], point[name], frozen, batches, real_RB, mechanism, untrained_P)
    total_RP = torch.zeros_like(point[name])
    for start in range(0, real_RB.shape[1], mechanism.microbatch_size):
        window = slice(start, start + mechanism.microbatch_size)
        extra = {key: tensor[:, window] for key, tensor in batches.extra.items()}
        part = Batch(batches.x[:, window], batches.y[:, window], extra, training=True)
        grads_RMP = example_gradients(name, loss, layouts, point, frozen, part)
        if untrained_P is not None:
            grads_RMP = grads_RMP.masked_fill(untrained_P, 0)
        total_RP += (clipped(grads_RMP, mechanism, layouts[name]) * real_RB[:, window, None]).sum(1)
    return total_RP


def _native_sums(
    loss: ClassifierLoss,
    layout: Layout,
    point_RP: Tensor,
    frozen: Tree,
    batches: Batch,
    real_RB: Tensor,
    mechanism: Mechanism,
    untrained_P: Tensor | None,
) -> Tensor:
    """The kernels' own. They know cross-entropy; of other losses they are told the gradients by the scores."""
    kernel = loss.network.native
    assert kernel is not None
    params = layout.unpack(point_RP)
    own = [params[name] for name in kernel.trained_names]
    if isinstance(loss.task, Classification):
        targets = Targets(labels=batches.y, offset=frozen.get(LOGIT_OFFSET))
    else:
        scores_RBC = kernel.forward(batches.x, own, keep=False)[0].requires_grad_()
        targets = Targets(*torch.autograd.grad(loss.of_scores(scores_RBC, frozen, batches.y).sum(), scores_RBC))
    stays = [False] * len(layout.names) if untrained_P is None else _first_of_each(untrained_P, layout)
    trained = [name for name, untrained in zip(layout.names, stays, strict=True) if not untrained]
    sums = kernel.clipped_sums(
        batches.x, own, real_RB, targets, trained, mechanism.clip_norm, per_tensor=mechanism.clipping == "per_tensor"
    )
    return torch.cat([sums[name].reshape(len(point_RP), -1) for name in layout.names], dim=1)


def _first_of_each(untrained_P: Tensor, layout: Layout) -> list[bool]:
    """Whether each tensor stays: parameters do so tensor by tensor."""
    return [bool(part[0]) if len(part) else True for part in untrained_P.split(layout.sizes)]


def example_gradients(
    name: str,
    loss: Loss,
    layouts: Mapping[str, Layout],
    point: dict[str, Tensor],
    frozen: Tree,
    batches: Batch,
) -> Tensor:
    """(R, M, P): every example has a copy of the parameters of its own, so one backward pass tells them apart."""
    size = batches.y.shape[:2]
    own = point[name][:, None].expand(*size, -1).contiguous().requires_grad_()

    def one(vector: Tensor, everyone: dict[str, Tensor], fixed: Tree, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        vectors = {**everyone, name: vector}
        trainable = {group: layouts[group].unpack(flat) for group, flat in vectors.items()}
        alone = Batch(x[None], y[None], {key: tensor[None] for key, tensor in extra.items()}, training=True)
        return loss(trainable, fixed, alone)[0]

    try:
        if isinstance(loss, ClassifierLoss) and loss.network.reads_cohorts:
            losses = _as_clients(loss, layouts[name], own, frozen, batches)
        else:
            of_client = vmap(one, in_dims=(0, None, None, 0, 0, 0), randomness="different")
            of_cohort = vmap(of_client, randomness="different")
            losses = of_cohort(own, point, frozen, batches.x, batches.y, batches.extra)
        (grads_RMP,) = torch.autograd.grad(losses.sum(), own)
    except RuntimeError as error:
        raise ConfigError(
            f"the gradients of single examples, which privacy needs, cannot be told apart for this model: {error}. "
            "Its layers must treat the examples of a batch one by one."
        ) from error
    return grads_RMP


def _as_clients(loss: ClassifierLoss, layout: Layout, own_RMP: Tensor, frozen: Tree, batches: Batch) -> Tensor:
    """Every example as a client with a batch of one, where the network computes many clients at once."""
    count = batches.y.shape[1]
    alone = Batch(batches.x.flatten(0, 1)[:, None], batches.y.flatten(0, 1)[:, None], {}, training=True)
    repeated = trees.tree_map(lambda leaf: leaf.repeat_interleave(count, 0), frozen)
    return loss.cohort({"model": layout.unpack(own_RMP.flatten(0, 1))}, repeated, alone)


def clipped(grads_RMP: Tensor, mechanism: Mechanism, layout: Layout) -> Tensor:
    """Every example's gradient, scaled down to the norm C: as a whole, or tensor by tensor.

    One that is not finite counts for nothing: scaled it would still be NaN.
    """
    if mechanism.clipping == "whole":
        return _shortened(grads_RMP, mechanism.clip_norm)
    parts = grads_RMP.split(layout.sizes, dim=-1)
    return torch.cat([_shortened(part, mechanism.clip_norm) for part in parts], dim=-1)


def _shortened(grads: Tensor, most: float) -> Tensor:
    norms = grads.norm(dim=-1, keepdim=True)
    short = grads * (most / norms.clamp_min(DIVISOR_OF_ROUNDING)).clamp_max(1.0)
    return torch.where(norms.isfinite(), short, 0.0)
