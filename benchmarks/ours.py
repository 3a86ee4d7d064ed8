"""A workload in the library's embedded engine, in the way that the library itself chooses.

    python benchmarks/ours.py W1

Waits for numbers of rounds on standard input; `against_loops.py` and `against_peers.py` ask.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from serve import serve
from workloads import NUM_CLASSES, WORKLOADS, Workload, client_data

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, AlgorithmSetup
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.specialist_mixture import PersonalState, mixture_losses, with_general_outputs
from fedmoe.assembly import build_algorithm, build_networks, resolve_backend
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.config import ExperimentConfig, parse_config
from fedmoe.core_types import ClientData
from fedmoe.engines.embedded import Forked, InProcess, default_workers, start
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Coordinator
from fedmoe.engines.worker import Worker
from fedmoe.result import versions
from fedmoe.streams import Streams
from fedmoe.training.backends import cohort_size
from fedmoe.training.inference import Backend
from fedmoe.training.local import train_mixture

MODELS = {
    "cnn": {"name": "small_cnn"},
    "mixture": {"name": "small_cnn"},
    "logistic": {"name": "mlp", "hidden": []},
    "resnet20": {"name": "resnet", "depth": 20, "groups": 4},
}


def config_of(workload: Workload) -> ExperimentConfig:
    plan = {
        "epochs": workload.epochs,
        "batch_size": workload.batch_size,
        "learning_rate": workload.learning_rate,
        "optimizer": workload.optimizer,
        "patience": 10**6,  # nobody stops early: the work is the same for every system
        "check_every": workload.check_every,
    }
    name = "fedavg" if workload.averages else "specialist_mixture"
    return parse_config(
        {
            "algorithm": {"name": name, "validate_every": 10**9},
            "model": MODELS[workload.model],
            "training": {"federated": plan, "local": plan, "personal": plan},
            "schedule": {"clients_per_round": workload.clients_per_round},
        }
    )


def built(workload: Workload, federation: Federation) -> tuple[Algorithm, Backend, Callable[[int], int]]:
    """As a run builds it, in the way that the library chooses; of the mixture's personalisation the second half."""
    config = config_of(workload)
    networks = build_networks(config.model, federation, None, None)
    backend = resolve_backend(config, networks)
    algorithm = build_algorithm(config, federation, networks, backend)
    size = cohort_size(networks, backend)
    if workload.averages:
        return algorithm, backend, size
    plan = config.training.personal
    setup = AlgorithmSetup(*networks, plan, plan, plan, workload.clients_per_round, backend)
    stage = algorithm._replace(
        personalize=lambda shared, _client, _personal, data, rng: mixture_stage(setup, shared, data, rng)
    )
    return stage, backend, size


def mixture_stage(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    """The personalisation of the specialist mixture from where its specialist exists: Algorithm 1, lines 8-9."""
    begin = {
        "specialist": shared.model,
        "gate": trees.stack([setup.gate.init(seed) for seed in rng.seeds("gate")]),
    }
    data = data.map(lambda part: with_general_outputs(setup, shared, part))
    return PersonalState(**train_mixture(begin, mixture_losses(setup), data, setup.personal, rng, setup.backend))


def federation_of(workload: Workload) -> Federation:
    def hold(client: int) -> Records:
        x, y = map(torch.from_numpy, client_data(workload, client))
        own = workload.num_examples
        everyone = torch.ones(len(y), dtype=torch.bool)
        train, validation, test = (examples(x[rows], y[rows]) for rows in (slice(own), slice(own, None), slice(0)))
        return Records(train, validation, test, everyone[:own], everyone[own:])

    held = [hold(client) for client in range(workload.num_clients)]  # in memory, as for the plain loop
    pool = np.arange(workload.num_clients)
    return Federation(workload.num_clients, 0, NUM_CLASSES, workload.input_shape, pool, held[0].test, held.__getitem__)


class Ours:
    """Rounds of the coordinator; for the mixture a round is the personalisation of all clients."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.federation = workload, federation_of(workload)
        self.algorithm, self.backend, self.cohort_size = built(workload, self.federation)
        self.worker = Worker(self.algorithm, self.federation, folder / "private.sqlite", 0)
        self.server, self.round = self.algorithm.init_server(0), 0

    def start(self) -> InProcess | Forked:
        return start(self.worker, default_workers())

    def run(self, transport: InProcess | Forked, rounds: int) -> None:
        for _ in range(rounds):
            self.round += 1
            # Never the last round, which would validate; another end each time, so that everyone is personalised anew.
            coordinator = Coordinator(
                self.algorithm,
                self.federation,
                transport,
                seed=0,
                rounds=10**9 + self.round,
                cohort_size=self.cohort_size,
                manifest=Manifest(),
            )
            if self.workload.averages:
                self.server, _ = coordinator.run_round(self.server, self.round)
            else:
                kept = coordinator.deliver(self.server, range(self.workload.num_clients))
                for _clients in coordinator.personalize(kept):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    workload = WORKLOADS[parser.parse_args().workload]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(workload, Path(folder))
        with ours.start() as transport:
            size = ours.cohort_size(workload.clients_per_round)
            about = {"backend": ours.backend, "workers": default_workers(), "cohort_size": size}
            serve(lambda rounds: ours.run(transport, rounds), **about, **versions())


if __name__ == "__main__":
    main()
