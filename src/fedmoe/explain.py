"""What a config would do before it does it: which way of training, why, and about how long."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fedmoe import assembly
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.engines.embedded import default_workers, start
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Coordinator
from fedmoe.engines.worker import Worker
from fedmoe.training.backends import Backend, cohort_size, reason


class Explanation(NamedTuple):
    """`seconds_per_round` was measured on a round or two that are thrown away; None where clients never talk."""

    backend: Backend
    why: str
    weights: int
    layers: list[str]  # of the native program; empty on the general ways
    workers: int
    rounds: int
    seconds_per_round: float | None


def explain(config: ExperimentConfig) -> Explanation:
    federation = assembly.build_federation(config).federation
    networks = assembly.build_networks(config.model, federation, None, None)
    backend = assembly.resolve_backend(config, networks)
    why = reason(networks, backend) if config.engine.backend == "auto" else f"engine.backend={backend!r} asks for it"
    algorithm = assembly.build_algorithm(config, federation, networks, backend)
    workers = config.engine.workers or default_workers()
    layers = [layer.describe() for layer in networks[0].program.layers] if backend == "native" else []
    seconds = (
        _time_round(config, federation, algorithm, cohort_size(networks, backend), workers) if algorithm.round else None
    )
    rounds = config.schedule.rounds if algorithm.round else 0
    return Explanation(backend, why, networks[0].num_weights, layers, workers, rounds, seconds)


def _time_round(
    config: ExperimentConfig, federation: Federation, algorithm: Algorithm, size: Callable[[int], int], workers: int
) -> float:
    """The second round: the first one also pays for warming up."""
    server = algorithm.init_server(config.seed)
    with TemporaryDirectory() as folder:
        worker = Worker(algorithm, federation, Path(folder) / "private.sqlite", config.seed)
        with start(worker, workers) as transport:
            coordinator = Coordinator(
                algorithm,
                federation,
                transport,
                seed=config.seed,
                rounds=10**9,  # so that neither is the last one
                cohort_size=config.engine.cohort_size or size,
                manifest=Manifest(),
            )
            for number in (1, 2):
                begun = time.monotonic()
                server, _ = coordinator.run_round(server, number)
    return time.monotonic() - begun
