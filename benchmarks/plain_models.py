"""The models of the workloads as a PyTorch user writes them. They share nothing with the library on purpose."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import VOCABULARY


def make_model(kind: str, num_outputs: int = 10) -> nn.Module:
    if kind == "logistic":
        return nn.Linear(784, num_outputs)
    if kind == "bilstm":
        return BiLSTM(num_outputs)
    blocks = {"resnet20": 3, "resnet8": 1}.get(kind)
    return ResNet(num_outputs, blocks) if blocks else small_cnn(num_outputs)


def small_cnn(num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, num_outputs),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if width == width_in else 2
        self.inner = nn.Sequential(
            nn.Conv2d(width_in, width, 3, self.stride, 1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(4, width),
        )
        self.added = width - width_in

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added)) if self.added else x
        return F.relu(self.inner(x) + shortcut)


class ResNet(nn.Sequential):
    def __init__(self, num_outputs: int, blocks: int) -> None:
        widths = [16] + [width for width in (16, 32, 64) for _ in range(blocks)]
        super().__init__(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            *(ResidualBlock(before, width) for before, width in itertools.pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, num_outputs),
        )


class BiLSTM(nn.Module):
    """The final states of both directions, of which neither reads padding.

    Two LSTMs over padded texts, the second over turned-round ones: on a CPU this takes a third of the time of one over
    packed texts.
    """

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 100, padding_idx=0)
        self.forwards = nn.LSTM(100, 64, batch_first=True)
        self.backwards = nn.LSTM(100, 64, batch_first=True)
        self.head = nn.Linear(128, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1)
        longest = int(lengths.max())
        x, texts = x[:, :longest], torch.arange(len(x))
        turned = x.gather(1, (lengths[:, None] - 1 - torch.arange(longest)) % longest)
        ahead, back = self.forwards(self.embedding(x))[0], self.backwards(self.embedding(turned))[0]
        scores: Tensor = self.head(torch.cat([ahead[texts, lengths - 1], back[texts, lengths - 1]], 1))
        return scores
