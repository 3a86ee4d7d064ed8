"""What a reproduction needs beside its runs: common experts before them, one for each seed; audits after them.

Cells that need the same one share it: its file is named by all that its weights depend on.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedmoe.config import ExperimentConfig
from fedmoe.storage.files import make_private_folder
from fedmoe.storage.rundir import RunDirectory
from fedmoe.sweeps.plan import Cell, is_finished

PLACE = "{common}"  # in a setting that names a file: the common expert's


def with_common_expert(cell: Cell, folder: Path, epochs: int) -> Cell:
    """The cell with the file of its common expert, which is not made yet, wherever it is asked for."""
    config = cell.config
    if config.common_expert is None:
        return cell
    file = (folder / f"common-{_digest(config, epochs)}-seed{config.seed}.safetensors").absolute()
    changes: dict[str, Any] = {"common_expert": config.common_expert.model_copy(update={"weights": file})}
    if config.model.start_from is not None and config.model.start_from.name == PLACE:
        changes["model"] = config.model.model_copy(update={"start_from": file})
    return cell._replace(config=config.model_copy(update=changes))


def _digest(config: ExperimentConfig, epochs: int) -> str:
    """Of all that the weights depend on but the seed: public rows are the same for every seed and kind of split."""
    table, common = config.model_dump(mode="json"), config.common_expert
    assert common is not None
    network = table["common_expert"]["model"] or {k: v for k, v in table["model"].items() if not k.startswith("start_")}
    sizes = [table["split"][name] for name in ("public_size", "public_validation_size")]
    facts = [table["data"], network, table["training"]["local"], sizes, common.until_accuracy, epochs]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=4).hexdigest()


def pretrain_missing(cells: Sequence[Cell], epochs: int) -> Iterator[str]:
    """Train the common experts whose files are not there; yields a sentence for each."""
    from fedmoe.models.start_weights import write_weights
    from fedmoe.pretraining import Pretrained, pretrain_events

    for cell in cells:
        common = cell.config.common_expert
        if common is None or common.weights.exists():
            continue
        make_private_folder(common.weights.parent)
        *_, made = pretrain_events(cell.config, common.until_accuracy, epochs)
        assert isinstance(made, Pretrained)
        write_weights(common.weights, made.weights, made.notes)
        words = f"common expert of seed {cell.config.seed}: {made.epoch.accuracy:.1%} of the held-out public rows right"
        missed = (
            "" if made.reached else f", though {common.until_accuracy:.0%} were asked for: {epochs} epochs ended it"
        )
        yield f"{words} after {made.epoch.number} epochs{missed}"


def untrained_common_expert(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """The config with a common expert that has learnt nothing, where its own is not there yet: it costs the same."""
    common = config.common_expert
    if common is None or common.weights.exists():
        return config
    from fedmoe.assembly.networks import make_networks
    from fedmoe.federations import build_federation
    from fedmoe.models.start_weights import write_weights

    network = make_networks(common.model or config.model, build_federation(config).federation, None, None)[0]
    file = folder / "untrained.safetensors"
    write_weights(file, {**network.init(0, "untrained"), **network.constants}, {})
    starts = config.model.start_from == common.weights
    model = config.model.model_copy(update={"start_from": file}) if starts else config.model
    changes = {"common_expert": common.model_copy(update={"weights": file}), "model": model}
    return config.model_copy(update=changes)


def audit_missing(cells: Sequence[Cell]) -> None:
    """Audit what a server could read of labels, of finished runs that were not."""
    from fedmoe.audit import audit_labels

    for cell in cells:
        if is_finished(cell) and not RunDirectory(cell.directory).labels_audit.exists():
            audit_labels(cell.directory)
