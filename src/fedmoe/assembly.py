"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedmoe import import_strings
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.federation import Federation, federation_from_split
from fedmoe.clients.generated import generated_federation
from fedmoe.clients.opt_out import OptOut, opt_out
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.config import ExperimentConfig, OptOutConfig, with_algorithm
from fedmoe.core_types import ClientId
from fedmoe.data.dataset import Dataset
from fedmoe.data.lexicon import limit_vocabulary
from fedmoe.data.loading import load_dataset
from fedmoe.data.npz import load_npz_folder
from fedmoe.errors import ConfigError, DataError
from fedmoe.evaluation.metrics import Metric, load_metrics
from fedmoe.models.catalog import build_model
from fedmoe.models.fingerprint import tensors_digest
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.settings import ModelConfig
from fedmoe.partition.draw import domain_transform, draw_split
from fedmoe.partition.settings import MajoritySplit
from fedmoe.partition.split import Split
from fedmoe.training.backends import Backend, choose_backend, cohort_size, kernel_notes
from fedmoe.training.fallbacks import fallback_note
from fedmoe.training.local import LocalTrainer


def build_split(config: ExperimentConfig, dataset: Dataset) -> Split:
    return draw_split(config.split, dataset, config.seed)


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
    source: "Built"
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # of the user's own, beside accuracy and loss
    notes: tuple[str, ...] = ()  # for the user: what could be faster, what a setting does not do

    @property
    def backend(self) -> Backend:
        backend = self.config.engine.backend
        assert backend != "auto"
        return backend

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
    source = Built(federation) if federation is not None else build_federation(config)
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
    metrics = load_metrics(config.evaluation.metrics)
    return Parts(resolved, whole, *networks, made, title, size, source, metrics, tuple(notes))


class Built(NamedTuple):
    """A federation, and what can be shown of it: the split and class counts where there is one data set to split."""

    federation: Federation
    split: Split | None = None
    class_counts: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()


def build_federation(config: ExperimentConfig) -> Built:
    if config.data.name == "npz":
        return Built(_federation_of_folder(config))
    if config.data.name == "generated":
        sizes = config.split.model_dump(exclude={"kind", "share", "pairs"})
        if config.split.kind != "majority" or config.opt_out != OptOutConfig():
            raise ConfigError(
                "data.name='generated' makes clients with two favourite classes and no opt-out: "
                "use split.kind='majority' and leave opt_out away."
            )
        return Built(generated_federation(**sizes, seed=config.seed))
    dataset, digest = _data(config)
    if isinstance(dataset, Federation):
        return Built(dataset)
    split = build_split(config, dataset)
    opted = build_opt_out(config, split, dataset)
    if dataset.lexicon is not None:
        dataset = limit_vocabulary(dataset, _shared_rows(split, opted), config.data.vocabulary_size)
    transform = domain_transform(config.split, split, dataset.num_classes, config.seed)
    federation = federation_from_split(dataset, split, opted, transform)
    federation = replace(federation, digest=federation.digest + digest)
    counts = split.class_counts(dataset.train.y.numpy(), dataset.num_classes) if dataset.num_classes else None
    return Built(federation, split, counts, dataset.class_names)


def _data(config: ExperimentConfig) -> tuple[Dataset | Federation, str]:
    """What the config names, and a digest where only the content can tell whether it is the same again."""
    name, chosen = config.data.name, config.data
    if not import_strings.is_import_string(name):
        return load_dataset(name, chosen.folder), ""
    made = import_strings.call("data.name", name, {"seed": config.seed}, chosen.settings(), Federation, Dataset)
    if isinstance(made, Dataset):
        tensors = {"train.x": made.train.x, "train.y": made.train.y, "test.x": made.test.x, "test.y": made.test.y}
        return made, f"-{tensors_digest(tensors)}"
    for section, unused in (("split", config.split == MajoritySplit()), ("opt_out", config.opt_out == OptOutConfig())):
        if not unused:
            raise ConfigError(
                f"data.name={name!r} returned a Federation, in which clients have their records and opted out or not: "
                f"the section [{section}] does nothing. Remove it, or return a Dataset."
            )
    return made, ""


def build_opt_out(config: ExperimentConfig, split: Split, dataset: Dataset) -> OptOut:
    chosen = config.opt_out
    return opt_out(
        split,
        dataset.train,
        client_fraction=chosen.client_fraction,
        clients=chosen.clients,
        record_fraction=chosen.record_fraction,
        rules=[(rule.field, rule.values) for rule in chosen.rules],
        masks=_read_masks(chosen),
        seed=config.seed,
    )


def _shared_rows(split: Split, opted: OptOut) -> NDArray[np.int64]:
    """Training rows whose words may be known to everyone: opted in, and not of a client that never takes part."""
    trains = np.arange(len(split.train.rows)) < split.train.offsets[split.num_clients]
    rows: NDArray[np.int64] = split.train.rows[opted.train_opted_in & trains]
    return rows


def _federation_of_folder(config: ExperimentConfig) -> Federation:
    """One file per client. Whole clients opt out by their place in the order of file names."""
    if config.data.folder is None:
        raise ConfigError("data.name='npz' needs data.folder: a folder with one .npz file (x, y) per client.")
    chosen = config.opt_out
    if chosen != OptOutConfig(clients=chosen.clients):
        raise ConfigError("with data.name='npz' only opt_out.clients works; for records use federation_from_clients.")
    clients = load_npz_folder(config.data.folder)
    names = list(clients)
    unknown = [number for number in chosen.clients if not 0 <= number < len(names)]
    if unknown:
        raise ConfigError(f"opt_out.clients={unknown[0]}, but the clients are numbered 0 to {len(names) - 1}.")
    opted_out = {names[number]: True for number in chosen.clients}
    return federation_from_clients(clients, num_classes=config.data.num_classes, opted_out=opted_out, seed=config.seed)


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
        federated=LocalTrainer(config.training.federated, backend),
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
    for exchanges in (algorithm.round, algorithm.after_rounds, algorithm.delivery):
        names = [exchange.name for exchange in exchanges]
        if len(set(names)) < len(names):
            raise ConfigError(f"two exchanges of {config.algorithm.name} share a name: {names}. Name each differently.")
    return algorithm


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


def _read_masks(config: OptOutConfig) -> dict[int, NDArray[np.bool_]] | None:
    if config.masks is None:
        return None
    return _masks_of_file(config.masks)


def _masks_of_file(path: Path) -> dict[int, NDArray[np.bool_]]:
    remedy = "Write it with numpy.savez: one bool array per client id, such as savez(path, **{'0': mask})."
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"opt_out.masks={str(path)!r} cannot be read as .npz: {error}. {remedy}") from error
    for name, array in arrays.items():
        if not name.isdigit() or array.dtype != np.bool_:
            raise DataError(
                f"opt_out.masks={str(path)!r}: array {name!r} of {array.dtype} is no client's mask. {remedy}"
            )
    return {int(name): array for name, array in arrays.items()}
