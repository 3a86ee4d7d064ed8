"""The algorithm of a run, and what it is made with."""

import torch

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.label_priors.any_algorithm import with_priors
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.assembly.settings import clients_per_round, require_images, task_of
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId
from fedmoe.errors import ConfigError
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.network import Network
from fedmoe.models.task import Regression
from fedmoe.training.backends import Backend
from fedmoe.training.devices import CPU
from fedmoe.training.local import LocalTrainer


def build_setup(
    config: ExperimentConfig,
    federation: Federation,
    unlabelled_new_clients: tuple[ClientId, ...],
    networks: tuple[Network, Network],
    backend: Backend,
    weights: tuple[float, ...] | None = None,
    common: CommonExpert | None = None,
    device: torch.device = CPU,
) -> AlgorithmSetup:
    """`weights` are those of classes."""
    require_images(config, federation)
    number, anchors = clients_per_round(config), config.schedule.anchors
    task = task_of(config, federation)
    return AlgorithmSetup(
        *networks,
        federated=LocalTrainer(config.training.federated, backend, config.schedule.rounds, weights, task, device),
        local=LocalTrainer(config.training.local, backend, class_weights=weights, task=task, device=device),
        personal=LocalTrainer(config.training.personal, backend, class_weights=weights, task=task, device=device),
        clients_per_round=None if number is None else number - (anchors.per_round if anchors else 0),
        num_clients=federation.num_clients,
        num_participants=len(federation.participants),
        num_classes=federation.num_classes,
        target_shape=federation.target_shape,
        input_shape=federation.input_shape,
        unlabelled_new_clients=unlabelled_new_clients,
        release=config.schedule.release,
        side_values=federation.side_values,
        anchors=tuple(anchors.clients) if anchors else (),
        common=common,
        task=task,
    )


def build_algorithm(config: ExperimentConfig, setup: AlgorithmSetup) -> Algorithm:
    if setup.federated.backend == "native":
        for network in (setup.expert, setup.gate):
            network.go_native()
        if setup.common is not None and setup.common.network.obstacle is None:
            setup.common.network.go_native()
    algorithm = make_algorithm(config, setup)
    if isinstance(setup.task, Regression) and algorithm.no_regression:
        raise ConfigError(
            f"these data are a regression, and {config.algorithm.name} cannot predict numbers: "
            f"{algorithm.no_regression}. Choose another algorithm, such as fedavg or specialist_mixture."
        )
    _require_names(config.algorithm.name, algorithm)
    return algorithm


def make_algorithm(config: ExperimentConfig, setup: AlgorithmSetup) -> Algorithm:
    algorithm = config.algorithm.entry.factory(config.algorithm.options(), setup)
    return with_priors(algorithm, setup, config.algorithm.name) if config.evaluation.priors else algorithm


def _require_names(name: str, algorithm: Algorithm) -> None:
    """Records and manifests go by them: which client sent what in a round must be clear."""
    validation = (algorithm.validation.exchange,) if algorithm.validation else ()
    for exchanges in ((*algorithm.round, *validation), algorithm.after_rounds, algorithm.delivery):
        names = [exchange.name for exchange in exchanges]
        if len(set(names)) < len(names):
            raise ConfigError(f"two exchanges of {name} share a name: {names}. Name each differently.")
