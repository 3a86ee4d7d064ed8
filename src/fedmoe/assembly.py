"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.federation import Federation
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.config import ExperimentConfig, with_algorithm
from fedmoe.core_types import ClientId
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metrics import Metric, load_metrics
from fedmoe.federations import BuiltFederation, build_federation
from fedmoe.models.catalog import build_model
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.settings import ModelConfig
from fedmoe.training.backends import Backend, choose_backend, cohort_size, kernel_notes
from fedmoe.training.fallbacks import fallback_note
from fedmoe.training.local import LocalTrainer


@dataclass(frozen=True)
class Parts:
    """Everything that a run needs, built once. `config` holds the backend that was chosen."""

    config: ExperimentConfig
    federation: Federation
    expert: Network
    gate: Network
    algorithm: Algorithm
    title: str  # what tables call the algorithm
    cohort_size: int | Callable[[int], int]  # how many clients are computed together, of how many that take part
    source: BuiltFederation
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside accuracy and loss
    notes: tuple[str, ...] = ()  # for the user: what could be faster, what a setting does not do

    @property
    def backend(self) -> Backend:
        backend = self.config.engine.backend
        assert backend != "auto"
        return backend

    @property
    def data_digest(self) -> str:
        """What a run folder records of the data: of opted-in records alone, where not everyone is asked for scores."""
        of_all = self.config.evaluation.clients_asked == "all" or not self.federation.opted_in_digest
        return self.federation.digest if of_all else self.federation.opted_in_digest

    def fallback_notes(self) -> list[str]:
        """What of the local training is not whole epochs in the native kernels, and why; trains one client briefly."""
        if self.backend != "native":
            return []
        return [fallback_note(why) for why in native_fallbacks(self.algorithm, self.federation, self.config.seed)]


def build(
    config: ExperimentConfig,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
) -> Parts:
    """The parts of a run: run, compare, explain, audit, benchmarks and engines start from here.

    Args:
        federation: the user's own clients; the config's data and split are then not read.
        expert, gate: the user's own modules or factories of modules.
        algorithm: a factory of the user's own; see `config.with_algorithm`.
    """
    if algorithm is not None:
        config = with_algorithm(config, algorithm)
    source = BuiltFederation(federation) if federation is not None else build_federation(config)
    whole = source.federation
    if config.evaluation.pooled:
        whole = with_pooled_client(whole, config.evaluation.pooled, config.seed)
    networks = build_networks(config.model, whole, expert, gate)
    backend = resolve_backend(config, networks)
    made = build_algorithm(config, whole, networks, backend)
    notes = kernel_notes(networks, backend) if config.engine.backend in ("auto", "native") else []
    if config.schedule.release and made.release is None:
        notes.append(f"{config.algorithm.name} has nothing to release: schedule.release does nothing.")
    resolved = config.model_copy(update={"engine": config.engine.model_copy(update={"backend": backend})})
    size = config.engine.cohort_size or cohort_size(networks, backend)
    title = config.algorithm.label or config.algorithm.entry.title
    metrics = load_metrics(config.evaluation.metrics, whole.num_classes)
    return Parts(resolved, whole, *networks, made, title, size, source, metrics, tuple(notes))


def build_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """The user's modules, or those of the config. The gate is the same network with one output (Listo Zec et al.)."""
    if not federation.num_classes:
        raise ConfigError(
            "these data are a regression; the algorithms so far are for classification. Choose other data."
        )
    classes = federation.num_classes
    shape = federation.input_shape
    networks = (
        Network(expert or (lambda: _model(config, federation, classes)), "expert", shape),
        Network(gate or (lambda: _model(config, federation, 1)), "gate", shape),
    )
    probe = federation.load(0).train.x[:2]
    for network, outputs in zip(networks, (classes, 1), strict=True):
        network.check_output(probe, outputs)
    return networks


def _model(config: ModelConfig, federation: Federation, outputs: int) -> nn.Module:
    return build_model(config, federation.input_shape, outputs, federation.vocabulary_size)


def build_algorithm(
    config: ExperimentConfig,
    federation: Federation,
    networks: tuple[Network, Network],
    backend: Backend,
) -> Algorithm:
    if backend == "native":
        for network in networks:
            network.go_native()
    wanted = config.schedule.clients_per_round
    _require_images(config, federation)
    setup = AlgorithmSetup(
        *networks,
        federated=LocalTrainer(config.training.federated, backend, config.schedule.rounds),
        local=LocalTrainer(config.training.local, backend),
        personal=LocalTrainer(config.training.personal, backend),
        clients_per_round=None if wanted == "all" else wanted,
        num_clients=federation.num_clients,
        num_participants=len(federation.participants),
        num_classes=federation.num_classes,
        input_shape=federation.input_shape,
        unlabelled_new_clients=_unlabelled_new_clients(federation),
        release=config.schedule.release,
        side_values=federation.side_values,
    )
    algorithm = config.algorithm.entry.factory(config.algorithm.options(), setup)
    _require_names(config.algorithm.name, algorithm)
    return algorithm


def _require_names(name: str, algorithm: Algorithm) -> None:
    """Records and manifests go by them: which client sent what in a round must be clear."""
    validation = (algorithm.validation.exchange,) if algorithm.validation else ()
    for exchanges in ((*algorithm.round, *validation), algorithm.after_rounds, algorithm.delivery):
        names = [exchange.name for exchange in exchanges]
        if len(set(names)) < len(names):
            raise ConfigError(f"two exchanges of {name} share a name: {names}. Name each differently.")


def _unlabelled_new_clients(federation: Federation) -> tuple[ClientId, ...]:
    """By the length of their masks: nothing is read or prepared for this."""
    unseen = range(federation.num_clients, federation.num_clients + federation.num_unseen)
    return tuple(client for client in unseen if not len(federation.load(client).train_opted_in))


def _require_images(config: ExperimentConfig, federation: Federation) -> None:
    for stage in ("federated", "local", "personal"):
        augment = getattr(config.training, stage).augment
        if augment and len(federation.input_shape) != 3:
            raise ConfigError(
                f"training.{stage}.augment={augment!r} changes images (channels, height, width), but these examples "
                f"have shape {federation.input_shape}. Leave it away, or choose image data."
            )


def resolve_backend(config: ExperimentConfig, networks: tuple[Network, Network]) -> Backend:
    wanted = config.engine.backend
    if wanted == "auto":
        return choose_backend(networks)
    for network in networks:
        if wanted == "native" and network.obstacle:
            raise ConfigError(
                f"engine.backend='native' (or a run that was begun so), but the {network.name} cannot: "
                f"{network.obstacle}. "
                "Set engine.backend='auto' for a new run; a run must end the way it began."
            )
    return wanted
