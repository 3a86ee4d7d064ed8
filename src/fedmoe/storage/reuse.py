"""The rounds of one run as the start of another whose rounds would be the same."""

from collections.abc import Callable

from fedmoe.core_types import Tree
from fedmoe.errors import MessageError
from fedmoe.storage.checkpoints import Checkpoint, load_newest, save_checkpoint
from fedmoe.storage.files import read_bytes, write_atomically
from fedmoe.storage.rundir import RunDirectory


def adopt_rounds(
    source: RunDirectory,
    target: RunDirectory,
    rounds: int,
    run_ids: tuple[str, str],
    server_with: Callable[[Tree], Tree],
) -> tuple[bool, list[str]]:
    """Give `target` the checkpoint of the last of the `rounds` of `source`, and the metrics up to it, as its own.

    To be called while `target` is open; one that has a checkpoint already is left alone. `run_ids` are those of source
    and target. `server_with` makes the server's state of `target` out of what the rounds of `source` came to, which is
    read as names within names: what followed them there, and what is to follow here, may be something else. The note
    of a checkpoint holds the state of the metrics under "metrics". Where the source's files are not what they were,
    nothing is adopted: the rounds are computed again. Private states are not adopted: runs share rounds only where the
    rounds need none. Returns whether anything was adopted, and what there is to say.
    """
    ours, theirs = run_ids
    if any(target.checkpoints.glob("round-*")):
        return False, []
    checkpoint, notes = load_newest(
        source.checkpoints, dict, ours, lambda found: source.check_metrics(*found.note["metrics"]), up_to=rounds
    )
    if checkpoint is None:
        return False, notes
    try:
        server = server_with(_of_rounds(checkpoint))
    except MessageError as error:
        return False, [*notes, f"the rounds of {source.path} do not fit this run and are computed again: {error}"]
    length, _ = checkpoint.note["metrics"]
    write_atomically(target.metrics, read_bytes(source.metrics)[:length])
    save_checkpoint(target.checkpoints, checkpoint._replace(server=server), theirs)
    return True, notes


def _of_rounds(checkpoint: Checkpoint) -> Tree:
    """Without the part of the state that belongs to what follows the rounds, if there is one."""
    field = checkpoint.note.get("rounds_field")
    return checkpoint.server if field is None else checkpoint.server[field]
