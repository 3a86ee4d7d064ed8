"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmoe.algorithms.algorithm import Algorithm, Setting
from fedmoe.algorithms.catalog import find
from fedmoe.clients.federation import Federation, federation_from_split
from fedmoe.clients.opt_out import opt_out
from fedmoe.config import ExperimentConfig, OptOutConfig
from fedmoe.data.dataset import Dataset
from fedmoe.data.sources import load_dataset
from fedmoe.errors import DataError
from fedmoe.models.catalog import build_model
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.settings import ModelConfig
from fedmoe.partition.draw import domain_transform, draw_split
from fedmoe.partition.split import Split
from fedmoe.training.inference import Way
from fedmoe.training.ways import choose_way


def build_split(config: ExperimentConfig, dataset: Dataset) -> Split:
    return draw_split(config.split, dataset, config.seed)


def build_federation(config: ExperimentConfig) -> tuple[Federation, Split, Dataset]:
    dataset = load_dataset(config.data.name, config.data.folder)
    split = build_split(config, dataset)
    chosen = config.opt_out
    opted = opt_out(
        split,
        dataset.train,
        client_fraction=chosen.client_fraction,
        clients=chosen.clients,
        record_fraction=chosen.record_fraction,
        rules=[(rule.field, rule.values) for rule in chosen.rules],
        masks=_read_masks(chosen),
        seed=config.seed,
    )
    transform = domain_transform(config.split, split, dataset.num_classes, config.seed)
    return federation_from_split(dataset, split, opted, transform), split, dataset


def build_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """The user's modules, or those of the config. The gate is the same network with one output (Listo Zec et al.)."""
    shape, classes, words = federation.input_shape, federation.num_classes, federation.vocabulary_size
    networks = (
        Network(expert or (lambda: build_model(config, shape, classes, words)), "expert"),
        Network(gate or (lambda: build_model(config, shape, 1, words)), "gate"),
    )
    probe = federation.load(0).train.x[:2]
    for network, outputs in zip(networks, (classes, 1), strict=True):
        network.check_output(probe, outputs)
    return networks


def build_algorithm(config: ExperimentConfig, networks: tuple[Network, Network], way: Way) -> Algorithm:
    wanted = config.schedule.clients_per_round
    setting = Setting(
        *networks,
        federated=config.training.federated,
        local=config.training.local,
        personal=config.training.personal,
        clients_per_round=None if wanted == "all" else wanted,
        way=way,
    )
    return find(config.algorithm.name).factory(config.algorithm.options(), setting)


def resolve_way(config: ExperimentConfig, networks: tuple[Network, Network]) -> Way:
    return choose_way(networks) if config.engine.way == "auto" else config.engine.way


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
