"""The rounds of one run as the start of another whose rounds would be the same."""

from typing import Any

from fedmoe.storage.checkpoints import load_newest, save_checkpoint
from fedmoe.storage.files import read_bytes, write_atomically
from fedmoe.storage.rundir import RunDirectory


def adopt_rounds(
    source: RunDirectory, target: RunDirectory, server_type: type[Any], run_ids: tuple[str, str]
) -> tuple[bool, list[str]]:
    """Give `target` the last checkpoint of `source` and the metrics up to it, under the run id of `target`.

    To be called while `target` is open; one that has a checkpoint already is left alone. `run_ids` are those of source
    and target. The note of a checkpoint holds the state of the metrics under "metrics". Where the source's files are
    not what they were, nothing is adopted: the rounds are computed again. Private states are not adopted: runs share
    rounds only where the rounds need none. Returns whether anything was adopted, and what there is to say.
    """
    ours, theirs = run_ids
    if any(target.checkpoints.glob("round-*")):
        return False, []
    checkpoint, notes = load_newest(
        source.checkpoints, server_type, ours, lambda found: source.check_metrics(*found.note["metrics"])
    )
    if checkpoint is None:
        return False, notes
    length, _ = checkpoint.note["metrics"]
    write_atomically(target.metrics, read_bytes(source.metrics)[:length])
    save_checkpoint(target.checkpoints, checkpoint, theirs)
    return True, notes
