"""Training the mixture of a client (W3): ours against plain loops, and against validating one image at a time.

    python benchmarks/mixture.py [--repeats 3] [--clients 4]

W3: 100 training and 200 validation images per client, specialist and gate trained with the general CNN frozen, 20
epochs of batches of 10, validation every 5 epochs. Seconds are for one client in one process; ours computes the frozen
model's answers once, the plain loop once per batch.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe import trees
from fedmoe.algorithms.algorithm import Setting
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.specialist_mixture import mixture_losses, with_general_answers
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.experiment import versions
from fedmoe.models.images import SmallCNN
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.local import train_mixture
from fedmoe.training.plan import TrainingPlan
from fedmoe.vocabulary import ClientData

SHAPE, EPOCHS, CHECK_EVERY = (3, 32, 32), 20, 5


def data_of(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.rand(300, *SHAPE, generator=generator) - 0.5, torch.randint(0, 10, (300,), generator=generator)


def ours(client: int) -> float:
    plan = TrainingPlan(EPOCHS, 10, 1e-5, patience=10**6, check_every=CHECK_EVERY)
    expert, gate = Network(lambda: SmallCNN(SHAPE, 10)), Network(lambda: SmallCNN(SHAPE, 1))
    setting = Setting(expert, gate, plan, plan, plan, None, "looped")
    x, y = data_of(client)
    start = time.perf_counter()
    parts = (examples(x[:100], y[:100]), examples(x[100:], y[100:]))
    shared = trees.stack([Broadcast(expert.init(0))])
    data = ClientData(*(with_general_answers(setting, shared, side_by_side([part])) for part in parts))
    begin = {"specialist": trees.stack([expert.init(1)]), "gate": trees.stack([gate.init(2)])}
    train_mixture(begin, mixture_losses(setting), data, plan, Streams(0, "bench", 0, (client,)), "looped")
    return time.perf_counter() - start


def plain(client: int, *, one_by_one: bool = False) -> float:
    """`one_by_one` validates with batches of one image and uses the default Adam, as a published script does."""
    specialist, gate, general = SmallCNN(SHAPE, 10), SmallCNN(SHAPE, 1), SmallCNN(SHAPE, 10).requires_grad_(False)
    trained = [*specialist.parameters(), *gate.parameters()]
    x, y = data_of(client)
    start = time.perf_counter()
    optimizer = torch.optim.Adam(trained, 1e-5, fused=not one_by_one)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(100).split(10):
            optimizer.zero_grad()
            F.nll_loss(mix(specialist, gate, general, x[rows]), y[rows]).backward()
            optimizer.step()
        if one_by_one or epoch % CHECK_EVERY == 0:
            with torch.no_grad():
                for part in x[100:].split(1 if one_by_one else 200):
                    mix(specialist, gate, general, part)
    return time.perf_counter() - start


def mix(specialist: nn.Module, gate: nn.Module, general: nn.Module, x: Tensor) -> Tensor:
    h = torch.sigmoid(gate(x))
    return torch.log(h * F.softmax(specialist(x), 1) + (1 - h) * F.softmax(general(x), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for warm in (ours, plain):
        warm(0)
    turns = []
    for _ in range(arguments.repeats):
        for client in range(arguments.clients):
            turns.append((ours(client), plain(client), plain(client, one_by_one=True)))
    line = {
        "workload": "W3",
        "seconds_per_client": round(statistics.median(turn[0] for turn in turns), 2),
        "speed_against_plain": round(statistics.median(turn[1] / turn[0] for turn in turns), 2),
        "speed_against_one_by_one": round(statistics.median(turn[2] / turn[0] for turn in turns), 2),
    }
    print(json.dumps({**line, "load": round(os.getloadavg()[0], 2), **versions()}), flush=True)


if __name__ == "__main__":
    main()
