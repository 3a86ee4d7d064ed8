"""A residual network without kinks: where a ReLU is within rounding of zero, its gradient jumps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmoothResidual(nn.Module):
    """One block of two 3x3 convolutions beside a shortcut of either kind, a LayerNorm and dense layers.

    Any shape: `stride`, `width` and `groups` are those of the block, with or without biases.
    """

    def __init__(
        self, shape: tuple[int, ...], outputs: int, width: int = 32, stride: int = 2, groups: int = 2,
        shortcut: str = "pad", bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first = nn.Conv2d(shape[0], width, 3, stride, 1, bias=bias)
        self.first_norm = nn.GroupNorm(groups, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=bias)
        self.second_norm = nn.GroupNorm(groups, width, affine=bias, eps=1e-3)
        self.stride, added = stride, width - shape[0]
        self.front, self.behind = added // 3, added - added // 3
        self.project = nn.Conv2d(shape[0], width, 1, stride) if shortcut == "convolve" else None
        self.body = nn.Sequential(nn.Linear(width, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second_norm(self.second(torch.tanh(self.first_norm(self.first(x)))))
        if self.project is not None:
            beside = self.project(x)
        else:
            beside = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.front, self.behind))
        scores: Tensor = self.head(self.body(torch.tanh(inner + beside).mean((2, 3))))
        return scores
