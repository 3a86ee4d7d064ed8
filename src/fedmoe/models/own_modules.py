"""For modules of the user's own: normalisation that clients can share, and the mask of padded sequences."""

import copy
from typing import TypeGuard

from torch import Tensor, nn

Norm = nn.modules.batchnorm._NormBase
BatchNorm = nn.modules.batchnorm._BatchNorm


def to_group_norm(module: nn.Module, num_groups: int = 8) -> nn.Module:
    """A copy in which every layer with running statistics (BatchNorm) is a GroupNorm of the same scale and shift.

    Running statistics do not average over clients, and BatchNorm mixes the examples of a batch in training; a
    GroupNorm normalises each example by itself. Groups are `num_groups`, or fewer where the channels do not divide so,
    each of two channels or more: on inputs without places (N, C) a group of one would always be zero.

    >>> to_group_norm(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()))[1].num_groups
    6
    """
    if _keeps_statistics(module):
        return _group_norm(module, num_groups)
    converted = copy.deepcopy(module)
    for part in list(converted.modules()):
        for name, child in part.named_children():
            if _keeps_statistics(child):
                setattr(part, name, _group_norm(child, num_groups))
    return converted


def _keeps_statistics(layer: nn.Module) -> TypeGuard[Norm]:
    return isinstance(layer, Norm) and (layer.track_running_stats or isinstance(layer, BatchNorm))


def _group_norm(layer: Norm, num_groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    groups = next(g for g in range(max(1, min(num_groups, channels // 2)), 0, -1) if channels % g == 0)
    made = nn.GroupNorm(groups, channels, layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = copy.deepcopy(layer.weight), copy.deepcopy(layer.bias)
    return made.train(layer.training)


def split_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    """Padded sequences as their values and a mask (B, L), True where a step is real.

    Of ids (B, L) zeros are padding. Of numbers (B, L, F + 1) the last channel says which steps are real, as
    `federation_from_clients(..., sequence_length=...)` writes it; the values are the F others.
    """
    return (x[..., :-1], x[..., -1] != 0) if x.is_floating_point() else (x, x != 0)
