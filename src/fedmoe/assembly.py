"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.label_priors.any_algorithm import with_priors
from fedmoe.algorithms.label_priors.label_groups import prior_notes
from fedmoe.algorithms.private import privately
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.facts import FederationFacts, federation_without_data, unlabelled_new_clients
from fedmoe.clients.federation import Federation
from fedmoe.clients.per_example_cache import with_cached
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.clients.sampling import Drawing
from fedmoe.config import EngineConfig, ExperimentConfig, parse_config, with_algorithm
from fedmoe.core_types import ClientId, Tree
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metric_catalog import ALWAYS_MEASURED
from fedmoe.evaluation.metrics import Metric, load_metrics
from fedmoe.evaluation.personal_model import ModelFacts, PersonalModel, Predictor
from fedmoe.federations import BuiltFederation, build_federation
from fedmoe.models.catalog import build_model
from fedmoe.models.common_expert import PUBLIC_DIGEST, CommonExpert, temperature_in
from fedmoe.models.fingerprint import tensors_digest
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.settings import ModelConfig
from fedmoe.models.start_weights import read_weights, starting_from
from fedmoe.models.task import REGRESSION_LOSSES, Classification, Regression, Task
from fedmoe.run_privacy import RunPrivacy, resolve_privacy
from fedmoe.training.backends import Backend, choose_backend, cohort_size, kernel_notes
from fedmoe.training.class_weights import balanced_weights, explicit_weights
from fedmoe.training.devices import CPU, DeviceName, choose_device
from fedmoe.training.fallbacks import fallback_note
from fedmoe.training.local import LocalTrainer


class Given(NamedTuple):
    """What was passed to `build` as Python objects, beside the config."""

    federation: Federation | None = None
    expert: ModuleOrFactory | None = None
    gate: ModuleOrFactory | None = None
    algorithm: AlgorithmFactory | None = None
    common_expert: nn.Module | None = None


@dataclass(frozen=True)
class Parts:
    """Everything that a run needs, built once. `config` holds the backend and the device that were chosen."""

    config: ExperimentConfig
    federation: Federation
    expert: Network
    gate: Network
    algorithm: Algorithm
    title: str  # what tables call the algorithm
    cohort_size: int | Callable[[int], int]  # how many clients are computed together, of how many that take part
    source: BuiltFederation
    setup: AlgorithmSetup  # what the algorithm was made with
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside accuracy and loss
    notes: tuple[str, ...] = ()  # for the user: what could be faster, what a setting does not do
    privacy: RunPrivacy | None = None  # where what clients send is differentially private
    given: Given = field(default_factory=Given)  # from which, with the config, another process builds the same parts

    def __repr__(self) -> str:
        model = f"expert of {self.expert.num_weights:,} weights"
        return f"<Parts of {self.title}: {self.backend} backend; {model}; {self.federation!r}>"

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.engine.device)

    @property
    def backend(self) -> Backend:
        backend = self.config.engine.backend
        assert backend != "auto"
        return backend

    @property
    def task(self) -> Task:
        return task_of(self.config, self.federation)

    @property
    def data_digest(self) -> str:
        """What a run folder records of the data: of opted-in records alone, where not everyone is asked for scores."""
        of_all = self.config.evaluation.clients_asked == "all" or not self.federation.opted_in_digest
        return self.federation.digest if of_all else self.federation.opted_in_digest

    def personal_model(self, states: Mapping[str, Tree | None], client: ClientId) -> PersonalModel:
        """Of what a client ended with: its broadcast, client state and personal state."""
        facts = ModelFacts(
            self.federation.name_of(client), self.title, self.setup.input_shape, self.class_names,
            self.federation.input_dtype, self.setup.task,
        )  # fmt: skip
        return PersonalModel(self.predictor(), states, facts)

    def predictor(self) -> Predictor:
        """The algorithm over networks of its own that PyTorch computes, whichever backend the run trains with."""
        expert, gate = self.expert.plain_copy(), self.gate.plain_copy()
        common = self.setup.common and self.setup.common.plain_copy()
        by_pytorch = self.setup.federated._replace(backend="sequential")
        setup = self.setup._replace(expert=expert, gate=gate, common=common, federated=by_pytorch)
        networks = (expert, gate, *([common.network] if common else []))
        return Predictor(make_algorithm(self.config, setup), networks)

    @property
    def weights_digests(self) -> dict[str, str]:
        """Of the weights that a run is given: it goes on with the same ones only."""
        common = self.setup.common
        start = {"start_weights": tensors_digest(self.expert.init(0))} if self.config.model.start_from else {}
        return start | ({"common_expert": tensors_digest(common.constants)} if common else {})

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.federation.class_names or tuple(map(str, range(self.federation.num_classes)))

    def fallback_notes(self) -> list[str]:
        """What of the local training is not whole epochs in the native kernels, and why; trains one client briefly."""
        if self.backend != "native" or self.federation.is_elsewhere:
            return []
        return [fallback_note(why) for why in native_fallbacks(self.algorithm, self.federation, self.config.seed)]


def build(
    config: ExperimentConfig,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
) -> Parts:
    """The parts of a run: run, compare, explain, audit, benchmarks and engines start from here.

    Args:
        federation: the user's own clients; the config's data and split are then not read.
        expert, gate: the user's own modules or factories of modules.
        algorithm: a factory of the user's own; see `config.with_algorithm`.
        common_expert: a trained module of the user's own, instead of the section [common_expert].
    """
    given = Given(federation, expert, gate, algorithm, common_expert)
    if algorithm is not None:
        config = with_algorithm(config, algorithm)
    source = BuiltFederation(federation) if federation is not None else build_federation(config)
    whole = source.federation
    if config.evaluation.pooled:
        whole = with_pooled_client(whole, config.evaluation.pooled, config.seed)
    gate = gate_of(config, gate, whole)
    networks = build_networks(config.model, whole, starting(config.model, expert, whole), gate)
    _require_targets_of_the_task(config, whole)
    device = resolve_device(config.engine, private=config.privacy is not None)
    backend = resolve_backend(config, networks) if device == "cpu" else "batched"
    weights = class_weights(config, whole)
    common = build_common_expert(config, whole, whole.load(0).train.x[:2], expert, common_expert)
    Drawing(whole.participants, config.schedule.pool, config.schedule.anchors).check(
        clients_per_round(config), whole.num_clients
    )
    _require_same_groups(config)
    setup = build_setup(
        config, whole, unlabelled_new_clients(whole), networks, backend, weights, common, torch.device(device)
    )
    made = build_algorithm(config, setup)
    privacy = resolve_privacy(config, made)
    if privacy:
        made = privately(made, setup.clients_per_round)
    whole = with_cached(whole, made.once_of_examples)
    notes = kernel_notes(networks, backend) if config.engine.backend in ("auto", "native") and device == "cpu" else []
    if common is not None and source.split is not None and common.public_digest not in ("", source.split.public_digest):
        notes.append(
            "the common expert was trained on other public rows than those of this split, so clients and their scores "
            "may have rows that it has seen. Train it with this config: fedmoe pretrain CONFIG."
        )
    if config.schedule.release and made.release is None:
        notes.append(f"{config.algorithm.name} has nothing to release: schedule.release does nothing.")
    if made.priors is not None:
        notes += prior_notes(whole, setup.unlabelled_new_clients, fits_together=bool(made.after_rounds))
    chosen = {"backend": backend, "device": device}
    resolved = config.model_copy(update={"engine": config.engine.model_copy(update=chosen)})
    size = config.engine.cohort_size or cohort_size(networks, backend)
    if config.engine.one_client_per_message:
        size = 1
    title = config.algorithm.label or config.algorithm.entry.title
    metrics = load_metrics(config.evaluation.metrics, whole.num_classes, whole.task)
    return Parts(resolved, whole, *networks, made, title, size, source, setup, metrics, tuple(notes), privacy, given)


def rebuild(table: Mapping[str, Any], given: Given) -> Parts:
    """The same parts in another process: from a config as JSON and the objects that were given with it."""
    config = parse_config(table, given.algorithm)
    own = {"federation": given.federation, "expert": given.expert, "gate": given.gate}
    return build(config, **own, common_expert=given.common_expert)  # type: ignore[arg-type]


def build_without_data(
    config: ExperimentConfig,
    facts: FederationFacts,
    expert: ModuleOrFactory | None,
    gate: ModuleOrFactory | None,
    common_expert: nn.Module | None = None,
) -> Parts:
    """The parts of a run that is over: what its models need, and nothing to train with. PyTorch computes them."""
    federation = federation_without_data(facts)
    networks = make_networks(config.model, federation, expert, gate_of(config, gate, federation))
    some_x = torch.zeros(2, *federation.input_shape, dtype=federation.input_dtype)
    common = build_common_expert(config, federation, some_x, expert, common_expert)
    unlabelled = facts.unlabelled_new_clients
    setup = build_setup(config, federation, unlabelled, networks, "sequential", common=common)
    title = config.algorithm.label or config.algorithm.entry.title
    return Parts(
        config, federation, *networks, build_algorithm(config, setup), title, 1, BuiltFederation(federation), setup
    )


def build_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """`make_networks`, and each has read a few rows of the first client."""
    networks = make_networks(config, federation, expert, gate)
    probe = federation.load(0).train.x[:2]
    for network, outputs in zip(networks, (federation.num_outputs, 1), strict=True):
        network.check_output(probe, outputs)
    return networks


def make_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """The user's modules, or those of the config. The gate is the same network with one output (Listo Zec et al.)."""
    shape = federation.input_shape
    return (
        Network(expert or (lambda: _model(config, federation, federation.num_outputs)), "expert", shape),
        Network(gate or (lambda: _model(config, federation, 1)), "gate", shape),
    )


def starting(config: ModelConfig, expert: ModuleOrFactory | None, federation: Federation) -> ModuleOrFactory | None:
    """The expert, whose every copy starts from `model.start_from`, where the config names such a file."""
    if config.start_from is None:
        return expert
    weights, _ = read_weights(config.start_from, "model.start_from")
    source = expert or (lambda: _model(config, federation, federation.num_classes))
    return starting_from(source, weights, f"model.start_from={str(config.start_from)!r}", config.start_noise)


def build_common_expert(
    config: ExperimentConfig,
    federation: Federation,
    some_x: Tensor,
    expert: ModuleOrFactory | None,
    given: nn.Module | None,
) -> CommonExpert | None:
    """Of the section [common_expert]; its network is that of [model], or the user's own, unless it says otherwise."""
    chosen, classes = config.common_expert, federation.num_classes
    if given is not None:
        return CommonExpert(given, given.state_dict(), some_x, classes)
    if chosen is None:
        return None
    weights, notes = read_weights(chosen.weights, "common_expert.weights")
    source = expert if chosen.model is None else None
    return CommonExpert(
        source or (lambda: _model(chosen.model or config.model, federation, classes)),
        weights,
        some_x,
        classes,
        what=f"common_expert.weights={str(chosen.weights)!r}",
        embedding=chosen.embedding,
        temperature=temperature_in(notes),
        public_digest=notes.get(PUBLIC_DIGEST, ""),
    )


def clients_per_round(config: ExperimentConfig) -> int | None:
    """Anchors and others together; None: everyone who opted in."""
    wanted = config.schedule.clients_per_round
    return None if wanted == "all" else wanted


def _require_same_groups(config: ExperimentConfig) -> None:
    """Both number a client's group by c mod groups: with different numbers neither would mean what it says."""
    pool, of_labels = config.schedule.pool, getattr(config.split, "label_groups", 1)
    if pool is not None and of_labels not in (1, pool.groups):
        raise ConfigError(
            f"split.label_groups={of_labels}, but schedule.pool.groups={pool.groups}: a pool would mix clients of "
            "several groups of labels. Give both the same number."
        )


def gate_of(config: ExperimentConfig, gate: ModuleOrFactory | None, federation: Federation) -> ModuleOrFactory | None:
    """The user's, or that of the section [gate]; None: a gate of the expert's kind."""
    chosen = config.gate
    return gate if gate is not None or chosen is None else lambda: _model(chosen, federation, 1)


def _model(config: ModelConfig, federation: Federation, outputs: int) -> nn.Module:
    return build_model(config, federation.input_shape, outputs, federation.vocabulary_size)


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
    _require_images(config, federation)
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


def task_of(config: ExperimentConfig, federation: Federation) -> Task:
    """What is predicted follows from the data; a regression's loss is a setting."""
    loss = config.training.loss
    if federation.target_shape is None:
        if loss not in (None, "cross_entropy"):
            raise ConfigError(
                f"training.loss={loss!r} is a loss of a regression, but these data have {federation.num_classes} "
                "classes. Leave it away."
            )
        return Classification()
    if loss == "cross_entropy":
        raise ConfigError(
            "training.loss='cross_entropy' needs classes, but these data are a regression. Choose "
            f"{', '.join(REGRESSION_LOSSES)}, or leave it away."
        )
    return Regression(loss or "squared", config.training.huber_delta)


def class_weights(config: ExperimentConfig, federation: Federation) -> tuple[float, ...] | None:
    """Balanced ones are counted over what may be shared: opted-in training rows of clients that take part."""
    given = config.training.class_weights
    if given is None:
        return None
    if federation.task == "regression":
        raise ConfigError("training.class_weights is set, but these data are a regression. Leave it away.")
    if given != "balanced":
        return explicit_weights(given, federation.num_classes, federation.class_names)
    counts = sum(federation.class_counts(int(client)) for client in federation.participants)
    assert isinstance(counts, Tensor)
    return balanced_weights(counts.tolist())


def _require_names(name: str, algorithm: Algorithm) -> None:
    """Records and manifests go by them: which client sent what in a round must be clear."""
    validation = (algorithm.validation.exchange,) if algorithm.validation else ()
    for exchanges in ((*algorithm.round, *validation), algorithm.after_rounds, algorithm.delivery):
        names = [exchange.name for exchange in exchanges]
        if len(set(names)) < len(names):
            raise ConfigError(f"two exchanges of {name} share a name: {names}. Name each differently.")


def _require_images(config: ExperimentConfig, federation: Federation) -> None:
    for stage in ("federated", "local", "personal"):
        augment = getattr(config.training, stage).augment
        if augment and len(federation.input_shape) != 3:
            raise ConfigError(
                f"training.{stage}.augment={augment!r} changes images (channels, height, width), but these examples "
                f"have shape {federation.input_shape}. Leave it away, or choose image data."
            )


def _require_targets_of_the_task(config: ExperimentConfig, federation: Federation) -> None:
    of_classes = federation.target_shape is None
    for name in config.schedule.stop_at or {}:
        if name in ALWAYS_MEASURED if of_classes else name == "accuracy":
            task = "have classes" if of_classes else "are a regression"
            raise ConfigError(
                f"schedule.stop_at has a target for {name!r}, but these data {task}. Choose loss, or another metric."
            )


def resolve_device(engine: EngineConfig, *, private: bool = False) -> DeviceName:
    """Where to train; `auto` steps back where the other settings need the CPU."""
    device = choose_device(engine.device)
    if device == "cpu":
        return device
    for key, value, fits in (
        ("engine.name", engine.name, engine.name == "embedded"),
        ("engine.backend", engine.backend, engine.backend in ("auto", "batched")),
        ("engine.workers", engine.workers, engine.workers in (None, 1)),
        ("privacy", "…", not private),
    ):
        if not fits and engine.device == "auto":
            return "cpu"
        if not fits:
            raise ConfigError(
                f"engine.device={device!r} and {key}={value!r} do not go together: on a device one process of the "
                f"embedded engine trains with the batched backend, without noise. Remove {key}, or engine.device."
            )
    return device


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
