"""Rounds of an algorithm in a few lines, everybody taking part: to compare with equations written out."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData, Tensors
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams, torch_stream
from fedmoe.training.backends import Backend
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

BACKENDS: list[Backend] = ["native", "batched", "sequential"]
WHOLE_BATCH = 1000


class End(NamedTuple):
    server: Any
    client_S: Any
    personal_S: Any
    updates: list[Any]  # of the last round


def run_rounds(algorithm: Algorithm, data: ClientData, rounds: int = 1) -> End:
    clients = tuple(range(len(data.train.counts)))
    (exchange,), server = algorithm.round, algorithm.init_server(0)
    first = exchange.broadcast(server, 0, ())
    states = [algorithm.init_client(first, client, 0) for client in clients]
    client_S, personal_S, updates = trees.stack(states), None, []
    if algorithm.init_personal:
        own = [algorithm.init_personal(first, state, c, 0) for c, state in zip(clients, states, strict=True)]
        personal_S = trees.stack(own)
    for number in range(1, rounds + 1):
        sent_S = trees.stack([exchange.broadcast(server, client, ()) for client in clients])
        rng = Streams(0, exchange.name, number, clients)
        new_S, update_S, _ = exchange.local_update(sent_S, client_S, data, rng)
        if exchange.private_update:
            personal_S = exchange.private_update(sent_S, client_S, personal_S, data, private(rng))
        client_S, updates = new_S, trees.unstack(update_S, len(clients))
        server = exchange.aggregate(server, dict(zip(clients, updates, strict=True)), {}, {})
    return End(server, client_S, personal_S, updates)


def private(rng: Streams) -> Streams:
    return rng._replace(scope=f"{rng.scope}:private")


def setup_of(
    backend: Backend, features: int, classes: int, hidden: tuple[int, ...], num_clients: int, **plan: Any
) -> AlgorithmSetup:
    expert = Network(lambda: mlp((features,), classes, hidden), "expert", (features,))
    gate = Network(lambda: mlp((features,), 1, ()), "gate", (features,))
    if backend == "native":
        expert.go_native()
    trainer = LocalTrainer(LocalTraining(**{"optimizer": "sgd", "batch_size": WHOLE_BATCH, **plan}), backend)
    return AlgorithmSetup(expert, gate, trainer, trainer, trainer, None, num_clients, num_clients, classes, (features,))


def random_clients(*sizes: int, features: int = 4, classes: int = 3) -> ClientData:
    """Of any size, with labels that a model can hardly guess."""
    parts = []
    for client, size in enumerate(sizes):
        generator = torch_stream("random clients", client)
        x = torch.randn(size, features, generator=generator)
        parts.append(examples(x, torch.randint(0, classes, (size,), generator=generator)))
    return ClientData(side_by_side(parts), side_by_side(parts))


def contrary_clients(size: int = 40, clients: int = 4, features: int = 4) -> ClientData:
    """Two classes by the sign of the first feature, which half of the clients name the other way round."""
    parts = []
    for client in range(clients):
        x = torch.randn(size, features, generator=torch_stream("contrary clients", client))
        parts.append(examples(x, ((x[:, 0] > 0) ^ (client % 2 == 0)).long()))
    return ClientData(side_by_side(parts), side_by_side(parts))


def gradient(setup: AlgorithmSetup, model: Tensors, data: ClientData, client: int) -> Tensors:
    """Of the mean cross-entropy on all training examples of a client, by autograd."""
    size = int(data.train.counts[client])
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
    loss = F.cross_entropy(setup.expert.call_module(own, data.train.x[client, :size]), data.train.y[client, :size])
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


def mean_loss(setup: AlgorithmSetup, model: Tensors, data: ClientData) -> float:
    """Over clients."""
    size = len(data.train.counts)
    return float(setup.federated.mean_loss(setup.expert, trees.stack([model] * size), data.train).mean())


def distance(one: Tensors, other: Tensors) -> float:
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())
