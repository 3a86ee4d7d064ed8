"""The workloads, as plain numbers and arrays: every system trains the same tensors for the same number of steps.

Imports numpy alone, so that a peer in an environment of its own can read it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMAGE = (3, 32, 32)
NUM_CLASSES = 10
# Of W5: as the 10,000 most frequent words of AG News, of which the first stands for all others, and its first 64 words.
VOCABULARY, MOST_TOKENS = 10_000, 64


@dataclass(frozen=True)
class Workload:
    name: str
    model: str  # cnn, logistic, mixture, resnet20, resnet8 or bilstm
    num_clients: int
    num_examples: int  # for training, per client
    input_shape: tuple[int, ...]
    clients_per_round: int
    epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    rounds: int  # of one timed turn
    num_validation: int = 0
    check_every: int = 5  # epochs between looks at the validation loss, where there is one
    num_classes: int = NUM_CLASSES

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of all clients of a round."""
        return self.clients_per_round * self.epochs * self.num_examples // self.batch_size

    @property
    def averages(self) -> bool:
        """Whether a round ends in an average; the clients of a mixture keep what they trained."""
        return self.model != "mixture"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "cnn", 100, 100, IMAGE, 5, 3, 10, "adam", 5e-5, rounds=20),
        Workload("W1b", "cnn", 100, 100, IMAGE, 50, 3, 10, "adam", 5e-5, rounds=2),
        Workload("W2", "logistic", 1000, 60, (784,), 10, 1, 10, "sgd", 0.03, rounds=100),
        Workload("W3", "mixture", 20, 100, IMAGE, 20, 20, 10, "adam", 1e-5, rounds=1, num_validation=200),
        Workload("W4", "resnet20", 10, 100, IMAGE, 10, 1, 20, "sgd", 0.1, rounds=2),
        Workload("W4b", "resnet8", 10, 100, IMAGE, 10, 1, 20, "sgd", 0.1, rounds=6),
        Workload("W5", "bilstm", 1000, 100, (MOST_TOKENS,), 50, 3, 10, "adam", 5e-4, rounds=1, num_classes=4),
    )
}

TITLES = {
    "W1": "small CNN, 5 of 100 clients per round, 3 epochs, Adam",
    "W1b": "the same, 50 clients per round",
    "W2": "logistic regression, 10 of 1000 clients per round, SGD",
    "W3": "specialist and gate of 20 clients, general model frozen",
    "W4": "ResNet-20 with GroupNorm, 10 clients per round, SGD",
    "W4b": "the same with ResNet-8",
    "W5": "bidirectional LSTM on texts, 50 of 1000 clients per round, 3 epochs, Adam",
}

# Multiply-adds of the networks on one image. The small CNN: two convolutions, three dense layers.
CNN_PRODUCTS = 28 * 28 * 6 * 75 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10


def resnet_products(blocks: int) -> int:
    """Of three stages of so many blocks. A convolution costs the same in each; two of them halve the image."""
    stem, convolution = 32 * 32 * 16 * 27, 32 * 32 * 16 * 144
    return stem + (3 * 2 * blocks - 2) * convolution + 2 * (convolution // 2) + 64 * 10


PRODUCTS = {"cnn": CNN_PRODUCTS, "resnet20": resnet_products(3), "resnet8": resnet_products(1)}


def step_flop(workload: Workload) -> int:
    """Dense-equivalent operations of one step: two per multiply-add, the backward pass twice the forward."""
    return workload.batch_size * 2 * 3 * PRODUCTS[workload.model]


def client_data(workload: Workload, client: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Examples and labels of one client, the training examples first."""
    rng = np.random.default_rng(client)
    count = workload.num_examples + workload.num_validation
    if workload.model == "bilstm":
        return texts(rng, count), rng.integers(0, workload.num_classes, count)
    x = rng.random((count, *workload.input_shape), dtype=np.float32) - np.float32(0.5)
    return x, rng.integers(0, workload.num_classes, count)


def texts(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Texts as long as those of AG News (39 words, standard deviation 10, at most 64), padded with 0 at the end.

    Word 1 is every sixteenth, the others follow Zipf's law with the offset 2.7: in 10 texts are about 250 different
    words (AG News: 240), in 100 about 1550 (AG News: 1510).
    """
    unknown = 0.062
    shares = 1 / (np.arange(VOCABULARY - 2) + 2.7)
    shares = np.concatenate([[unknown], (1 - unknown) * shares / shares.sum()])
    lengths = rng.normal(39.1, 9.7, count).round().clip(6, MOST_TOKENS)
    words = 1 + rng.choice(VOCABULARY - 1, (count, MOST_TOKENS), p=shares)
    return np.where(np.arange(MOST_TOKENS) < lengths[:, None], words, 0)
