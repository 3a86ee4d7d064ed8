"""Residual networks for small images, with GroupNorm: running statistics of a batch do not average over clients."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Shortcut = Literal["pad", "convolve"]


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Where the shape changes, the shortcut takes every other pixel and pads channels with zeros (option A of He et al.),
    or is a 1x1 convolution (option B).
    """

    def __init__(self, width_in: int, width: int, stride: int, groups: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(groups, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(groups, width)
        self.stride, self.added = stride, width - width_in
        self.projection: nn.Module | None = None
        if shortcut == "convolve" and (stride > 1 or self.added):
            convolution = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.projection = nn.Sequential(convolution, nn.GroupNorm(groups, width))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.projection is not None:
            projected: Tensor = self.projection(x)
            return projected
        if self.stride == 1 and not self.added:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))


class ResNet(nn.Module):
    """A 3x3 convolution, stages of blocks (all but the first halve the image), mean over pixels, one dense layer."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        blocks: tuple[int, ...],
        widths: tuple[int, ...],
        groups: int,
        shortcut: Shortcut,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(input_shape[0], widths[0], 3, 1, 1, bias=False), nn.GroupNorm(groups, widths[0]), nn.ReLU()
        )
        stages: list[nn.Module] = []
        width_in = widths[0]
        for stage, (number, width) in enumerate(zip(blocks, widths, strict=True)):
            for place in range(number):
                stride = 2 if stage > 0 and place == 0 else 1
                stages.append(Block(width_in, width, stride, groups, shortcut))
                width_in = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width_in, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return scores


def resnet(input_shape: tuple[int, ...], num_outputs: int, depth: Literal[8, 20, 34], groups: int | None) -> ResNet:
    """ResNet-8 and -20 as for CIFAR (16 to 64 channels, option A); ResNet-34 with 64 to 512 channels (option B).

    ResNet-34 starts with a 3x3 convolution and no pooling, as images are small.
    """
    if depth == 34:
        return ResNet(input_shape, num_outputs, (3, 4, 6, 3), (64, 128, 256, 512), groups or 32, "convolve")
    number = (depth - 2) // 6
    return ResNet(input_shape, num_outputs, (number,) * 3, (16, 32, 64), groups or 8, "pad")
