"""A run on disk: config, split, metrics, manifest, checkpoints, private states, results."""

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from fedmoe.errors import RunError
from fedmoe.storage.files import unwritable, write_atomically

# Where and how fast a run is computed does not make it another run.
FREE_TO_CHANGE = ("name", "engine.workers", "data.folder", "versions", "compare", "schedule.checkpoint_every")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.private_store = path / "clients" / "private.sqlite"
        self.split = path / "split.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.manifest = path / "manifest.json"
        self.results = path / "results.json"
        self.report = path / "report.html"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """One process at a time: two would overwrite each other's checkpoints."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.private_store.parent.mkdir(exist_ok=True)
            self.private_store.parent.chmod(0o700)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise RunError(f"{self.path} cannot be a run directory: {error.strerror}. Choose another.") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is in use by another process. Wait for it, or choose another.") from None
            yield

    def claim(self, config: dict[str, Any]) -> dict[str, Any]:
        """Write the config of a new run, or check that the run here has the same one; returns what is recorded."""
        path = self.path / "config.toml"
        if not path.exists():
            write_atomically(path, tomli_w.dumps(_without_none(config)).encode())
            return config
        try:
            recorded = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read: {error}. Restore it, or choose another run directory.") from error
        old, new = _flat(recorded), _flat(_without_none(config))
        for key in sorted({*old, *new}):
            free = any(key == name or key.startswith(name + ".") for name in FREE_TO_CHANGE)
            if not free and old.get(key) != new.get(key) and not (key == "engine.backend" and new.get(key) == "auto"):
                raise RunError(
                    f"{self.path} belongs to another run: {key} is {old.get(key)!r} there and {new.get(key)!r} here. "
                    "Use another directory (--dir), or delete that one."
                )
        return recorded

    def append_metrics(self, events: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(event) + "\n" for event in events)
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise unwritable(self.metrics, error) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Up to the first line that is not whole: a killed process or a power cut may leave a damaged tail."""
        events: list[dict[str, Any]] = []
        for line in self.metrics.read_bytes().split(b"\n")[:-1] if self.metrics.exists() else []:
            try:
                events.append(json.loads(line))
            except ValueError:
                break
        return events

    def forget_metrics_after(self, round_number: int, last_round: int) -> list[dict[str, Any]]:
        """Drop events that a resumed run will make again, as the end of the curve; returns the others."""
        again = {"round": round_number, "curve": min(round_number, last_round - 1)}
        kept = [event for event in self.read_metrics() if event.get("round", 0) <= again.get(event["event"], -1)]
        write_atomically(self.metrics, "".join(json.dumps(event) + "\n" for event in kept).encode())
        return kept

    def write_json(self, path: Path, value: Any) -> None:
        write_atomically(path, json.dumps(value, indent=1).encode())


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        results: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{folder} holds no finished run ({path.name} is missing). Run it to its end first.") from None
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error
    return results


def _without_none(value: Any) -> Any:
    """TOML has no null: a missing key is the default."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
