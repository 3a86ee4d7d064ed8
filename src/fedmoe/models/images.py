"""Plain networks for images and vectors. Each maps (B, *shape) to (B, outputs) unnormalised scores."""

import itertools
import math

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 max pool; then dense layers with ReLU.

    With channels (32, 64), dense (512,) and 10 classes on 3x32x32 it has 878,538 weights, as Reisser et al. count
    their LeNet-5; (61, 122) and (113, 226) channels have twice and four times as many.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, channels: tuple[int, int], dense: tuple[int, ...]
    ) -> None:
        super().__init__()
        depth, height, width = input_shape
        first, second = channels
        side = [((length - 4) // 2 - 4) // 2 for length in (height, width)]
        self.features = nn.Sequential(
            nn.Conv2d(depth, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(*dense_layers((second * side[0] * side[1], *dense), num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).flatten(1))
        return scores


class SmallCNN(LeNet):
    """The CNN of Listo Zec et al.: conv5x5 with 6, then 16 channels, each with ReLU and 2x2 max pool; then 120, 84."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, (6, 16), (120, 84))


def mlp(input_shape: tuple[int, ...], num_outputs: int, hidden: tuple[int, ...]) -> nn.Module:
    """Dense layers with ReLU between them; no hidden layer is logistic regression."""
    return nn.Sequential(nn.Flatten(), *dense_layers((math.prod(input_shape), *hidden), num_outputs))


def dense_layers(widths: tuple[int, ...], num_outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return [*layers, nn.Linear(widths[-1], num_outputs)]
