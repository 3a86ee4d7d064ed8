"""A workload in the library's embedded engine, or another one, in the way that the library itself chooses.

    python benchmarks/ours.py W1 [--engine ray]

Waits for numbers of rounds on standard input; `against_loops.py`, `against_peers.py` and `engines.py` ask.
"""

import argparse
import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from serve import serve
from workloads import VOCABULARY, WORKLOADS, Workload, client_data

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.algorithms.specialist_mixture import (
    PersonalState,
    mixture_losses,
    specialist_mixture,
    with_general_outputs,
)
from fedmoe.assembly import Parts, build
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.config import ExperimentConfig, parse_config
from fedmoe.core_types import ClientData
from fedmoe.engines.catalog import ENGINES, open_transport
from fedmoe.engines.embedded import default_workers
from fedmoe.engines.protocol import Transport
from fedmoe.engines.session import Session
from fedmoe.result import versions
from fedmoe.streams import Streams

MODELS = {
    "cnn": {"name": "small_cnn"},
    "mixture": {"name": "small_cnn"},
    "logistic": {"name": "mlp", "hidden": []},
    "resnet20": {"name": "resnet", "depth": 20, "groups": 4},
    "resnet8": {"name": "resnet", "depth": 8, "groups": 4},
    "bilstm": {"name": "text_lstm", "embedding": 100, "hidden": 64},
}


def config_of(workload: Workload, engine: str) -> ExperimentConfig:
    plan = {
        "epochs": workload.epochs,
        "batch_size": workload.batch_size,
        "learning_rate": workload.learning_rate,
        "optimizer": workload.optimizer,
        "patience": 10**6,  # nobody stops early: the work is the same for every system
        "check_every": workload.check_every,
    }
    named = {"algorithm": {"name": "fedavg", "validate_every": 10**9}} if workload.averages else {}
    return parse_config(
        {
            **named,
            "model": MODELS[workload.model],
            "training": {"federated": plan, "local": plan, "personal": plan},
            "schedule": {"clients_per_round": workload.clients_per_round},
            "engine": {"name": engine},
        }
    )


def built(workload: Workload, federation: Federation, engine: str) -> Parts:
    """As a run builds it, on the backend that the library chooses; of the mixture's personalisation the second half."""
    if workload.averages:
        return build(config_of(workload, engine), federation=federation)

    def stage(setup: AlgorithmSetup) -> Algorithm:
        return specialist_mixture(FedAvgConfig(validate_every=10**9), setup)._replace(
            personalize=lambda shared, _client, _personal, data, rng: mixture_stage(setup, shared, data, rng)
        )

    return build(config_of(workload, engine), federation=federation, algorithm=stage)


def mixture_stage(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    """The personalisation of the specialist mixture from where its specialist exists: Algorithm 1, lines 8-9."""
    begin = {
        "specialist": shared.model,
        "gate": trees.stack([setup.gate.init(seed) for seed in rng.seeds("gate")]),
    }
    data = data.map(lambda part: with_general_outputs(setup, shared, part))
    return PersonalState(**setup.personal.train_mixture(begin, mixture_losses(setup), data, rng))


def federation_of(workload: Workload) -> Federation:
    def hold(client: int) -> Records:
        x, y = map(torch.from_numpy, client_data(workload, client))
        own = workload.num_examples
        everyone = torch.ones(len(y), dtype=torch.bool)
        parts = (slice(own), slice(own, None), slice(0))
        # Copies: of a view all rows that it is taken from would be sent to an actor.
        train, validation, test = (examples(x[rows].clone(), y[rows].clone()) for rows in parts)
        return Records(train, validation, test, everyone[:own], everyone[own:])

    held = [hold(client) for client in range(workload.num_clients)]  # in memory, as for the plain loop
    pool = np.arange(workload.num_clients)
    words = VOCABULARY if workload.model == "bilstm" else None
    return Federation(
        workload.num_clients, 0, workload.num_classes, workload.input_shape, pool, held[0].test, held.__getitem__,
        vocabulary_size=words,
    )  # fmt: skip


class Ours:
    """Rounds of a session; for the mixture a round is the personalisation of all clients."""

    def __init__(self, workload: Workload, engine: str) -> None:
        self.workload, self.parts = workload, built(workload, federation_of(workload), engine)
        self.ends = itertools.count(10**9)  # no round is the last one, which would validate

    def run(self, transport: Transport, rounds: int) -> None:
        for _ in range(rounds):
            if self.workload.averages:
                self.session(transport).next_round()
            else:
                # Another end each time, so that everyone is personalised anew.
                session = Session(with_rounds(self.parts, next(self.ends)), transport)
                session.deliver(range(self.workload.num_clients))
                for _clients in session.personalize():
                    pass

    @functools.cache  # noqa: B019 (one object per process)
    def session(self, transport: Transport) -> Session:
        return Session(with_rounds(self.parts, next(self.ends)), transport)


def with_rounds(parts: Parts, rounds: int) -> Parts:
    schedule = parts.config.schedule.model_copy(update={"rounds": rounds})
    return replace(parts, config=parts.config.model_copy(update={"schedule": schedule}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    torch.set_num_threads(1)
    ours = Ours(workload, arguments.engine)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_transport(ours.parts, Path(folder) / "private.sqlite", "benchmark") as transport,
    ):
        size = ours.parts.cohort_size
        together = size(workload.clients_per_round) if callable(size) else size
        about = {"workers": default_workers(), "cohort_size": together}
        serve(lambda rounds: ours.run(transport, rounds), backend=ours.parts.backend, **about, **versions())


if __name__ == "__main__":
    main()
