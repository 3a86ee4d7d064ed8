"""What a careful PyTorch user writes by hand: FedAvg in a plain loop, in one process or one process per core.

The yardstick of `rounds.py`. It shares nothing with the library on purpose.
"""

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    name: str
    num_clients: int
    num_examples: int
    input_shape: tuple[int, ...]
    clients_per_round: int
    epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    rounds: int  # of one timed run


def client_data(workload: Workload, client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.rand(workload.num_examples, *workload.input_shape, generator=generator) - 0.5
    return x, torch.randint(0, 10, (workload.num_examples,), generator=generator)


class PlainClient:
    """One model that is loaded, trained and read back for each client in turn."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self.workload, self.model = workload, model
        self.data = [client_data(workload, client) for client in range(workload.num_clients)]

    def train(self, weights: Tensor, client: int) -> Tensor:
        workload = self.workload
        x, y = self.data[client]
        nn.utils.vector_to_parameters(weights, self.model.parameters())
        optimizer = self._optimizer()
        for _ in range(workload.epochs):
            order = torch.randperm(len(y))
            for rows in order.split(workload.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(self.model(x[rows]), y[rows]).backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def _optimizer(self) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if self.workload.optimizer == "adam" else torch.optim.SGD
        return kind(self.model.parameters(), lr=self.workload.learning_rate, fused=True)


def run_alone(workload: Workload, client: PlainClient, rounds: int) -> float:
    """Seconds for `rounds` rounds in this process, one thread."""
    weights = nn.utils.parameters_to_vector(client.model.parameters()).detach().clone()
    draw = random.Random(0)
    start = time.perf_counter()
    for _ in range(rounds):
        sampled = draw.sample(range(workload.num_clients), workload.clients_per_round)
        weights = torch.stack([client.train(weights, one) for one in sampled]).mean(0)
    return time.perf_counter() - start


class PlainPool:
    """The same loop with one process per core: shared weights, one queue of clients."""

    def __init__(self, workload: Workload, client: PlainClient, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.workload = workload
        vector = nn.utils.parameters_to_vector(client.model.parameters()).detach().clone()
        self.weights = vector.share_memory_()
        self.sums = torch.zeros(processes, len(vector)).share_memory_()
        self.tasks, self.done = context.SimpleQueue(), context.SimpleQueue()
        self.workers = [
            context.Process(target=self._work, args=(client, rank), daemon=True) for rank in range(processes)
        ]
        for worker in self.workers:
            worker.start()

    def _work(self, client: PlainClient, rank: int) -> None:
        torch.set_num_threads(1)
        while (number := self.tasks.get()) is not None:
            self.sums[rank] += client.train(self.weights, number)
            self.done.put(number)

    def run(self, rounds: int) -> float:
        draw = random.Random(0)
        start = time.perf_counter()
        for _ in range(rounds):
            for one in draw.sample(range(self.workload.num_clients), self.workload.clients_per_round):
                self.tasks.put(one)
            for _ in range(self.workload.clients_per_round):
                self.done.get()
            self.weights.copy_(self.sums.sum(0) / self.workload.clients_per_round)
            self.sums.zero_()
        return time.perf_counter() - start

    def stop(self) -> None:
        for _ in self.workers:
            self.tasks.put(None)
        for worker in self.workers:
            worker.join()


@contextmanager
def plain_pool(workload: Workload, client: PlainClient, processes: int) -> Iterator[PlainPool]:
    pool = PlainPool(workload, client, processes)
    try:
        yield pool
    finally:
        pool.stop()
