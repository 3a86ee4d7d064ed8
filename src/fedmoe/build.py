"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedmoe.algorithms.algorithm import Algorithm, Setting
from fedmoe.algorithms.catalog import find
from fedmoe.clients.federation import Federation, federation_from_split
from fedmoe.clients.opt_out import opt_out
from fedmoe.config import DirichletSplit, ExperimentConfig, ModelConfig, OptOutConfig
from fedmoe.data.dataset import Dataset
from fedmoe.data.sources import load_dataset
from fedmoe.errors import ConfigError, DataError
from fedmoe.models.images import SmallCNN, mlp
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.partition.dirichlet import split_by_dirichlet
from fedmoe.partition.majority import split_by_majority
from fedmoe.partition.split import Split
from fedmoe.training.inference import Way
from fedmoe.training.ways import choose_way


def build_split(config: ExperimentConfig, dataset: Dataset) -> Split:
    labels = (dataset.train.y.numpy(), dataset.test.y.numpy(), dataset.num_classes)
    settings = config.split.model_dump(exclude={"kind"})
    draw = split_by_dirichlet if isinstance(config.split, DirichletSplit) else split_by_majority
    return draw(*labels, **settings, seed=config.seed)


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
    return federation_from_split(dataset, split, opted), split, dataset


def build_model(config: ModelConfig, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    if config.name == "mlp":
        return mlp(input_shape, num_outputs, config.hidden)
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise ConfigError(
            f"model.name='small_cnn' needs images of at least 16x16 pixels; these examples have shape {input_shape}. "
            "Use model.name='mlp'."
        )
    return SmallCNN(input_shape, num_outputs)


def build_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """The user's modules, or those of the config. The gate is the same network with one output (Listo Zec et al.)."""
    shape, classes = federation.input_shape, federation.num_classes
    networks = (
        Network(expert or (lambda: build_model(config, shape, classes)), "expert"),
        Network(gate or (lambda: build_model(config, shape, 1)), "gate"),
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
