"""The workloads, as plain numbers and arrays: every system trains the same tensors for the same number of steps.

Imports numpy alone, so that a peer in an environment of its own can read it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IMAGE = (3, 32, 32)
NUM_CLASSES = 10


@dataclass(frozen=True)
class Workload:
    name: str
    model: str  # cnn, logistic, mixture, resnet20 or resnet8
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
    )
}

TITLES = {
    "W1": "small CNN, 5 of 100 clients per round, 3 epochs, Adam",
    "W1b": "the same, 50 clients per round",
    "W2": "logistic regression, 10 of 1000 clients per round, SGD",
    "W3": "specialist and gate of 20 clients, general model frozen",
    "W4": "ResNet-20 with GroupNorm, 10 clients per round, SGD",
    "W4b": "the same with ResNet-8",
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


def client_data(workload: Workload, client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Examples and labels of one client, the training examples first."""
    rng = np.random.default_rng(client)
    count = workload.num_examples + workload.num_validation
    x = rng.random((count, *workload.input_shape), dtype=np.float32) - np.float32(0.5)
    return x, rng.integers(0, NUM_CLASSES, count)
