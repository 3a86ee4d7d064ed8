"""Config -> federation: a data set that is split, a file per client, one table, or clients that are generated."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedmoe import import_strings
from fedmoe.clients.federation import Federation, federation_from_split
from fedmoe.clients.generated import generated_federation
from fedmoe.clients.opt_out import OptOut, opt_out
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.clients.own_table import federation_from_table, rows_by_client
from fedmoe.config import ExperimentConfig
from fedmoe.config_errors import nearest
from fedmoe.config_sections import OptOutConfig
from fedmoe.data.cells import text, texts
from fedmoe.data.dataset import Dataset
from fedmoe.data.lexicon import hash_vocabulary, keep_words, limit_vocabulary
from fedmoe.data.loading import load_dataset
from fedmoe.data.npz import load_npz_folder
from fedmoe.data.raw_table import as_raw_table
from fedmoe.data_choice import DataConfig, TableData
from fedmoe.errors import ConfigError, DataError
from fedmoe.models.fingerprint import tensors_digest
from fedmoe.partition.draw import domain_transform, draw_split
from fedmoe.partition.settings import MajoritySplit, OutsideSplit, PublicRows
from fedmoe.partition.split import Split


class BuiltFederation(NamedTuple):
    """A federation, and what can be shown of it: the split and class counts where there is one data set to split."""

    federation: Federation
    split: Split | None = None
    class_counts: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"<BuiltFederation: {self.federation!r}, {self.split!r}>"


def build_federation(config: ExperimentConfig) -> BuiltFederation:
    if config.engine.on_silos:
        raise ConfigError(
            f"engine.flower.num_clients={config.engine.flower.num_clients} declares silos, whose records are on their "
            "own machines and would be needed here. Train on them with `flwr run`; to simulate clients with the data "
            "of this config, remove num_clients from [engine.flower]."
        )
    if isinstance(config.data, TableData):
        return BuiltFederation(_federation_of_table(config, config.data))
    if config.data.name == "npz":
        return BuiltFederation(_federation_of_folder(config, config.data))
    if config.data.name == "generated":
        sizes = config.split.model_dump(exclude={"kind", "share", "pairs", *PublicRows.model_fields})
        if isinstance(config.split, PublicRows) and config.split.public_size:
            raise ConfigError("data.name='generated' has no rows but those of clients: leave split.public_size away.")
        if config.split.kind != "majority" or config.opt_out != OptOutConfig():
            raise ConfigError(
                "data.name='generated' makes clients with two favourite classes and no opt-out: "
                "use split.kind='majority' and leave opt_out away."
            )
        return BuiltFederation(generated_federation(**sizes, seed=_split_seed(config)))
    dataset, digest = _data(config, config.data)
    if isinstance(dataset, Federation):
        return BuiltFederation(dataset)
    split = draw_split(config.split, dataset, _split_seed(config))
    opted = build_opt_out(config, split, dataset)
    dataset = _with_words(dataset, config.data)
    if dataset.lexicon is not None:
        dataset = _with_vocabulary(config, dataset, _shared_rows(split, opted))
    transform = domain_transform(config.split, split, dataset.num_classes, _split_seed(config))
    federation = federation_from_split(dataset, split, opted, transform)
    federation = replace(federation, digest=federation.digest + digest)
    counts = split.class_counts(dataset.train.y.numpy(), dataset.num_classes) if dataset.num_classes else None
    return BuiltFederation(federation, split, counts)


def _split_seed(config: ExperimentConfig) -> int:
    chosen = None if isinstance(config.split, OutsideSplit) else config.split.seed
    return config.seed if chosen is None else chosen


def _data(config: ExperimentConfig, chosen: DataConfig) -> tuple[Dataset | Federation, str]:
    """What the config names, and a digest where only the content can tell whether it is the same again."""
    name = chosen.name
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


def _with_words(dataset: Dataset, chosen: DataConfig) -> Dataset:
    if chosen.max_words is None:
        return dataset
    if dataset.lexicon is None:
        raise ConfigError(f"data.max_words={chosen.max_words}, but {dataset.name} has no words. Leave it away.")
    return keep_words(dataset, chosen.max_words)


def _with_vocabulary(config: ExperimentConfig, dataset: Dataset, rows: NDArray[np.int64]) -> Dataset:
    assert isinstance(config.data, DataConfig)
    if config.data.vocabulary == "hashed":
        return hash_vocabulary(dataset, config.data.vocabulary_size)
    if config.privacy:
        raise ConfigError(
            "[privacy] is set, but the vocabulary is made of the words that clients use most: whoever sees it learns "
            "of their texts. Set data.vocabulary = 'hashed'."
        )
    return limit_vocabulary(dataset, rows, config.data.vocabulary_size)


def build_opt_out(config: ExperimentConfig, split: Split, dataset: Dataset) -> OptOut:
    chosen = config.opt_out
    return opt_out(
        split,
        dataset.train,
        client_fraction=chosen.client_fraction,
        clients=_numbers("opt_out.clients", chosen.clients),
        record_fraction=chosen.record_fraction,
        rules=[(rule.field, _numbers(f"opt_out.rules for {rule.field!r}", rule.values)) for rule in chosen.rules],
        masks=None if chosen.masks is None else _read_masks(chosen.masks),
        seed=config.seed,
    )


def _shared_rows(split: Split, opted: OptOut) -> NDArray[np.int64]:
    """Training rows whose words may be known to everyone: opted in, and not of a client that never takes part."""
    trains = np.arange(len(split.train.rows)) < split.train.offsets[split.num_clients]
    rows: NDArray[np.int64] = split.train.rows[opted.train_opted_in & trains]
    return rows


def _numbers(key: str, values: Sequence[int | str]) -> list[int]:
    for value in values:
        if isinstance(value, str):
            raise ConfigError(f"{key} has {value!r}, but these data have numbers. Names are for tables and npz files.")
    return [int(value) for value in values]


def _federation_of_folder(config: ExperimentConfig, data: DataConfig) -> Federation:
    """One file per client."""
    if data.folder is None:
        raise ConfigError("data.name='npz' needs data.folder: a folder with one .npz file (x, y) per client.")
    chosen = config.opt_out
    if chosen != OptOutConfig(clients=chosen.clients):
        raise ConfigError("with data.name='npz' only opt_out.clients works; for records use federation_from_clients.")
    clients = load_npz_folder(data.folder)
    opted_out = dict.fromkeys(_names(chosen.clients, list(clients)), True)
    return federation_from_clients(
        clients,
        num_classes=data.num_classes,
        task=data.task or "classification",
        opted_out=opted_out,
        seed=config.seed,
    )


def _federation_of_table(config: ExperimentConfig, data: TableData) -> Federation:
    chosen = config.opt_out
    if chosen != OptOutConfig(clients=chosen.clients, rules=chosen.rules):
        raise ConfigError("with data.name='table' opt_out knows clients and rules. Leave the other keys away.")
    table = as_raw_table(data.file)
    rows = rows_by_client(table, data.client)
    out_N = np.zeros(len(table), dtype=np.bool_)
    for rule in chosen.rules:
        values = {text(value) for value in rule.values}
        out_N |= np.array([word in values for word in texts(table.column(rule.field, "field of opt_out.rules"))])
    for name in _names(chosen.clients, list(rows)):
        out_N[rows[name]] = True
    opted_out = {name: torch.from_numpy(out_N[at]) for name, at in rows.items()}
    return federation_from_table(table, **data.settings(), opted_out=opted_out, seed=config.seed)


def _names(chosen: Sequence[int | str], names: Sequence[str]) -> list[str]:
    """Of clients that are named, or numbered in the order of files and of first rows."""
    for client in chosen:
        if isinstance(client, str) and client not in names:
            raise ConfigError(f"opt_out.clients names {client!r}. {nearest(client, names)}")
        if isinstance(client, int) and not 0 <= client < len(names):
            raise ConfigError(f"opt_out.clients={client}, but the clients are numbered 0 to {len(names) - 1}.")
    return [names[client] if isinstance(client, int) else client for client in chosen]


def _read_masks(path: Path) -> dict[int, NDArray[np.bool_]]:
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
