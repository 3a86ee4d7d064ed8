"""Run folders with something broken, and what a resume makes of them: the same result as ever, or a sentence.

The same damages each time: places are drawn from a seeded generator.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import make_expert, make_gate, tiny_config, tiny_federation
from fedmoe import trees
from fedmoe.errors import FedmoeError
from fedmoe.experiment import Started, Stopped, never, run_events
from fedmoe.result import Result
from fedmoe.storage.checkpoints import load_newest
from fedmoe.storage.rundir import RunDirectory

ROUNDS = 4
PAGE = 4096
Damage = Callable[[Path, Path, random.Random], None]  # of a file, given the same file of another run


def resume(name: str, directory: Path, should_stop: Callable[[], bool] = never, seed: int = 0) -> dict[str, Any]:
    """What the run came to, to the last bit, and under "notes" what it said on the way."""
    notes: list[str] = []
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    config = tiny_config(name, rounds=ROUNDS, seed=seed)
    for event in run_events(config, directory, **own, should_stop=should_stop):  # type: ignore[arg-type]
        if isinstance(event, Started):
            notes = event.notes
    assert isinstance(event, Result)
    folder = RunDirectory(directory)
    checkpoint, _ = load_newest(
        folder.checkpoints, event.algorithm.server_type, folder.read_config()["recorded"]["run_id"]
    )
    assert checkpoint is not None
    return {
        "notes": notes,
        "server": trees.to_bytes(checkpoint.server),
        "scores": event.data["scores"],
        "manifest": folder.manifest.read_text(),
        "metrics": [{**record, "seconds": 0} for record in folder.read_metrics()],
        "history": [{**record, "seconds": 0} for record in event.data["history"]],
    }


def stop_in_the_middle(name: str, directory: Path, seed: int = 0) -> None:
    """After two of the rounds and their checkpoints."""
    second = directory / "checkpoints" / "round-00000002.safetensors"
    try:
        resume(name, directory, second.exists, seed)
    except Stopped:
        return
    raise AssertionError("the run was to stop")


def outcome(name: str, directory: Path, expected: dict[str, Any]) -> str:
    """Any other ending than these two is a failure."""
    try:
        found = resume(name, directory)
    except FedmoeError as error:
        return f"refused: {error}"
    said = found.pop("notes")
    assert found == {key: value for key, value in expected.items() if key != "notes"}
    return f"as ever: {' '.join(said)}"


def delete(path: Path, _other: Path, _rng: random.Random) -> None:
    path.unlink()


def empty(path: Path, _other: Path, _rng: random.Random) -> None:
    path.write_bytes(b"")


def truncate(path: Path, _other: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def zero_a_page(path: Path, _other: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = PAGE * rng.randrange(-(-len(content) // PAGE))
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    path.write_bytes(content)


def flip_a_bit(path: Path, _other: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def exchange(path: Path, other: Path, _rng: random.Random) -> None:
    """For the same file of a run with another seed."""
    shutil.copy(other, path)


def put_a_folder(path: Path, _other: Path, _rng: random.Random) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


DAMAGES: tuple[Damage, ...] = (delete, empty, truncate, zero_a_page, flip_a_bit, exchange, put_a_folder)
