"""Training images changed a little each time they are seen: what is drawn for an example, and what that does to it.

Draws come from a client's own stream, one per example, so neither the cohort nor the backend changes them; the
groups of one fit see the same images. Validation and test images are never changed.
Shape suffixes: B examples, H height, W width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4
Name = Literal["crop_flip"]


class Augmentation(NamedTuple):
    draw: Callable[[torch.Generator, int], Tensor]  # (B, …): at random for each of so many examples
    change: Callable[[Tensor, Tensor], Tensor]  # x (B, …), draws (B, …) -> x


def draw_crop_flip(generator: torch.Generator, number: int) -> Tensor:
    """(B, 3): how far down, how far right, and whether to mirror."""
    most = torch.tensor([2 * PADDING + 1, 2 * PADDING + 1, 2])
    return (torch.rand(number, 3, generator=generator) * most).long()


def crop_flip(images: Tensor, draws_B3: Tensor) -> Tensor:
    """A window of the image padded by 4 zeros on every side, then mirrored or not (Reisser et al. 2021, Appendix A).

    Zeros are those of the model's input: mid-grey where images are scaled to [-1, 1].
    """
    height, width = images.shape[-2:]
    down, right, mirrored = draws_B3.unbind(-1)
    rows_BH = down[:, None] + torch.arange(height)
    across_W = torch.arange(width)
    columns_BW = right[:, None] + torch.where(mirrored[:, None] == 1, across_W.flip(0), across_W)
    padded = F.pad(images, [PADDING] * 4)
    example, channel = torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[:, None, None]
    return padded[example, channel, rows_BH[:, None, :, None], columns_BW[:, None, None, :]]


AUGMENTATIONS: dict[Name, Augmentation] = {"crop_flip": Augmentation(draw_crop_flip, crop_flip)}
