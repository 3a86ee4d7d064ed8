"""What must be there before the cells of a reproduction can run: common experts, one for each seed."""

from collections.abc import Iterator, Sequence

from fedmoe.models.start_weights import write_weights
from fedmoe.pretraining import Pretrained, pretrain_events
from fedmoe.storage.files import make_private_folder
from fedmoe.sweeps.plan import Cell


def pretrain_missing(cells: Sequence[Cell], epochs: int) -> Iterator[str]:
    """Train the common experts whose files are not there; yields a sentence for each."""
    for cell in cells:
        file = cell.config.common_expert.weights if cell.config.common_expert else None
        if file is None or file.exists():
            continue
        make_private_folder(file.parent)
        *_, made = pretrain_events(cell.config, None, epochs)
        assert isinstance(made, Pretrained)
        write_weights(file, made.weights, made.notes)
        yield f"common expert of seed {cell.config.seed}: {made.epoch.accuracy:.1%} of the held-out public rows right"
