"""The yardstick: a workload in a plain PyTorch loop, in one process or in one process per core.

    python benchmarks/plain_loop.py W1 [--processes 2] [--authors-way]

Waits for numbers of rounds on standard input; `against_loops.py` asks.
"""

import argparse
import multiprocessing
import random

import torch
from plain_models import make_model
from plain_training import tensors_of, train_classifier, train_mixture
from serve import serve
from torch import Tensor, nn
from workloads import WORKLOADS, Workload


class PlainClients:
    """One model that is loaded, trained and read back for each client in turn."""

    def __init__(self, workload: Workload, authors_way: bool) -> None:
        self.workload, self.authors_way = workload, authors_way
        self.model = make_model(workload.model, workload.num_classes)
        self.data = [tensors_of(workload, c) for c in range(workload.num_clients)]
        self.kept: dict[int, dict[str, Tensor]] = {}  # the mixtures of clients

    @property
    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def train(self, weights: Tensor, client: int) -> Tensor:
        nn.utils.vector_to_parameters(weights, self.model.parameters())
        if self.workload.averages:
            train_classifier(self.model, self.workload, *self.data[client])
        else:
            self.kept[client] = train_mixture(
                self.model, self.workload, *self.data[client], authors_way=self.authors_way
            )
        return self.weights


class Alone:
    """Everything in this process."""

    def __init__(self, clients: PlainClients) -> None:
        self.clients, self.workload = clients, clients.workload
        self.weights = clients.weights.clone()
        self.draw = random.Random(0)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            total = torch.zeros_like(self.weights)
            for client in self.draw.sample(range(self.workload.num_clients), self.workload.clients_per_round):
                total += self.clients.train(self.weights, client)
            self.weights = total / self.workload.clients_per_round


class Pool:
    """The same with one process per core: shared weights and sums, one queue of clients."""

    def __init__(self, clients: PlainClients, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.workload = clients.workload
        self.weights = clients.weights.clone().share_memory_()
        self.sums = torch.zeros(processes, len(self.weights)).share_memory_()
        self.tasks, self.done = context.SimpleQueue(), context.SimpleQueue()
        self.draw = random.Random(0)
        for rank in range(processes):
            context.Process(target=self._work, args=(clients, rank), daemon=True).start()

    def _work(self, clients: PlainClients, rank: int) -> None:
        while True:
            client = self.tasks.get()
            self.sums[rank] += clients.train(self.weights, client)
            self.done.put(client)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.sums.zero_()
            for client in self.draw.sample(range(self.workload.num_clients), self.workload.clients_per_round):
                self.tasks.put(client)
            for _ in range(self.workload.clients_per_round):
                self.done.get()
            self.weights.copy_(self.sums.sum(0) / self.workload.clients_per_round)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--authors-way", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clients = PlainClients(WORKLOADS[arguments.workload], arguments.authors_way)
    loop = Alone(clients) if arguments.processes == 1 else Pool(clients, arguments.processes)
    serve(loop.run, processes=arguments.processes, torch=torch.__version__)


if __name__ == "__main__":
    main()
