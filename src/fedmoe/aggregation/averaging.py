"""Weighted means of updates, summed in the order of client ids so that nothing depends on who replied first."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import ClientId

T = TypeVar("T")


def weighted_mean(by_client: Mapping[ClientId, T], weights: Mapping[ClientId, float | Tensor]) -> T:
    """sum_k w_k tree_k / sum_k w_k, leaf by leaf.

    >>> weighted_mean({1: torch.tensor(1.0), 0: torch.tensor(4.0)}, {0: 1, 1: 2})
    tensor(2.)
    """
    order = sorted(by_client)
    weight_S = torch.tensor([float(weights[client]) for client in order], dtype=torch.float64)
    shares = (weight_S / weight_S.sum()).tolist()

    def mean(*leaf: Tensor) -> Tensor:
        total: Tensor = leaf[0] * shares[0]
        for share, tensor in zip(shares[1:], leaf[1:], strict=True):
            total.add_(tensor, alpha=share)
        return total

    return trees.tree_map(mean, *[by_client[client] for client in order])
