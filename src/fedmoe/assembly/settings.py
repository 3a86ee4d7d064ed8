"""What settings mean for the data and the machine at hand, and refusals of those that do not fit them."""

from torch import Tensor

from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.config_sections import EngineConfig
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metric_catalog import ALWAYS_MEASURED
from fedmoe.models.network import Network
from fedmoe.models.task import REGRESSION_LOSSES, Classification, Regression, Task
from fedmoe.training.backends import Backend, choose_backend
from fedmoe.training.class_weights import balanced_weights, explicit_weights
from fedmoe.training.devices import DeviceName, choose_device


def clients_per_round(config: ExperimentConfig) -> int | None:
    """Anchors and others together; None: everyone who opted in."""
    wanted = config.schedule.clients_per_round
    return None if wanted == "all" else wanted


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


def require_same_groups(config: ExperimentConfig) -> None:
    """Both number a client's group by c mod groups: with different numbers neither would mean what it says."""
    pool, of_labels = config.schedule.pool, getattr(config.split, "label_groups", 1)
    if pool is not None and of_labels not in (1, pool.groups):
        raise ConfigError(
            f"split.label_groups={of_labels}, but schedule.pool.groups={pool.groups}: a pool would mix clients of "
            "several groups of labels. Give both the same number."
        )


def require_images(config: ExperimentConfig, federation: Federation) -> None:
    for stage in ("federated", "local", "personal"):
        augment = getattr(config.training, stage).augment
        if augment and len(federation.input_shape) != 3:
            raise ConfigError(
                f"training.{stage}.augment={augment!r} changes images (channels, height, width), but these examples "
                f"have shape {federation.input_shape}. Leave it away, or choose image data."
            )


def require_targets_of_the_task(config: ExperimentConfig, federation: Federation) -> None:
    of_classes = federation.target_shape is None
    for name in config.schedule.stop_at or {}:
        if name in ALWAYS_MEASURED if of_classes else name == "accuracy":
            task = "have classes" if of_classes else "are a regression"
            raise ConfigError(
                f"schedule.stop_at has a target for {name!r}, but these data {task}. Choose loss, or another metric."
            )
