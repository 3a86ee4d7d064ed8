"""Plain networks for images and vectors. Each maps (B, *shape) to (B, outputs) unnormalised scores."""

import itertools
import math

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """The CNN of Listo Zec et al.: conv5x5 with 6, then 16 channels, each with ReLU and 2x2 max pool; then 120, 84."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        side = [((length - 4) // 2 - 4) // 2 for length in (height, width)]
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(
            nn.Linear(16 * side[0] * side[1], 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).flatten(1))
        return scores


def mlp(input_shape: tuple[int, ...], num_outputs: int, hidden: tuple[int, ...]) -> nn.Module:
    """Dense layers with ReLU between them; no hidden layer is logistic regression."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))
