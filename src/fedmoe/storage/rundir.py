"""A run on disk: config, split, metrics, manifest, checkpoints, private states, results. For its owner's eyes only."""

import fcntl
import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from fedmoe.errors import RunError
from fedmoe.storage.files import (
    FOLDER_MODE,
    explained,
    make_private_folder,
    open_private,
    read_bytes,
    write_atomically,
)
from fedmoe.storage.metrics import MetricsFile

# Where and how fast a run is computed does not make it another run.
FREE_TO_CHANGE = (
    "name", "engine.workers", "engine.retries", "engine.address", "engine.flower.deadline",
    "engine.flower.join_seconds", "data.folder", "compare", "schedule.checkpoint_every",
    "recorded.versions", "recorded.run_id",
)  # fmt: skip

_locks: set[int] = set()  # descriptors of this process


def _close_inherited_locks() -> None:
    """A lock lasts as long as anybody has it open: a worker must not hold its parent's."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.checkpoints = path / "checkpoints"
        self.private_store = path / "clients" / "private.sqlite"
        self.split = path / "split.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.manifest = path / "manifest.json"
        self.federation = path / "federation.json"  # what `clients.facts` says of it
        self.delivery = path / "delivery.safetensors"  # where clients were asked something then
        self.common_expert = path / "common_expert.safetensors"  # a copy: the folder is whole without the user's file
        self.results = path / "results.json"
        self.report = path / "report.html"
        self.labels_audit = path / "audit_labels.json"  # what `fedmoe audit labels` found
        self._events = MetricsFile(self.metrics)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """One process at a time: two would overwrite each other's checkpoints."""
        try:
            for folder in (self.checkpoints, self.private_store.parent):
                make_private_folder(folder)
                folder.chmod(FOLDER_MODE)
            lock = open_private(self.path / ".lock", os.O_RDWR)
        except OSError as error:
            reason, remedy = explained(error)
            where = error.filename or self.path
            raise RunError(
                f"{self.path} cannot be a run directory: {where}: {reason}. Choose another, or {remedy}."
            ) from error
        _locks.add(lock)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is in use by another process. Wait for it, or choose another.") from None
            yield
            self._events.sync()
        finally:
            if lock in _locks:
                _locks.remove(lock)
                fcntl.flock(lock, fcntl.LOCK_UN)  # at once, even if a process forked just now has yet to close its copy
                os.close(lock)

    def record_config(self, config: dict[str, Any], defaults: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the config of a new run, or check that the run here has the same one; returns what is recorded.

        The table `recorded` holds what no user sets: versions, digests of data and modules, and the run's id, which is
        drawn here and binds checkpoints and private states to this folder. A setting that came into being after the
        run began counts as its default there: `defaults`, by section.
        """
        new = _without_none(config)
        try:
            recorded = self.read_config()
        except FileNotFoundError:
            made = {**new, "recorded": {**new.get("recorded", {}), "run_id": secrets.token_hex(16)}}
            write_atomically(self.config, tomli_w.dumps(made).encode())
            return made
        for key, old, asked in _differences(_flat(_without_none(defaults or {})) | _flat(recorded), _flat(new)):
            if not (key == "engine.backend" and asked == "auto"):
                raise RunError(
                    f"{self.path} belongs to another run: {key} is {old!r} there and {asked!r} here. "
                    "Use another directory (--dir), or delete that one."
                )
        return recorded

    def record_rounds(self, rounds: int) -> None:
        """More of them than the run was begun with."""
        known = self.read_config()
        changed = {**known, "schedule": {**known["schedule"], "rounds": rounds}}
        write_atomically(self.config, tomli_w.dumps(changed).encode())

    def read_config(self) -> dict[str, Any]:
        """What `record_config` wrote. Raises FileNotFoundError where no run is."""
        try:
            table = tomllib.loads(read_bytes(self.config).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(
                f"{self.config} cannot be read: {error}. Restore it, or choose another run directory."
            ) from error
        recorded = table.get("recorded")
        run_id = recorded.get("run_id") if isinstance(recorded, dict) else None
        if not isinstance(run_id, str) or not re.fullmatch("[0-9a-f]{32}", run_id):
            raise RunError(
                f"{self.config} names no run (recorded.run_id is {run_id!r}): it was altered, or written by an earlier "
                "version of fedmoe. Restore it, or use another directory (--dir)."
            )
        return table

    def append_metrics(self, events: list[dict[str, Any]]) -> None:
        """One write, however many events; on disk for good with the next `metrics_state` or when the run ends."""
        self._events.append(events)

    def read_metrics(self, length: int | None = None) -> list[dict[str, Any]]:
        """All events that are whole, or those of the first `length` bytes, which a checkpoint vouches for."""
        return self._events.read(length)

    def metrics_state(self) -> tuple[int, str]:
        """(length, digest) of the metrics so far, for the note of a checkpoint."""
        return self._events.state()

    def check_metrics(self, length: int, digest: str) -> str | None:
        """Why the metrics are not those that a checkpoint relied on, or None."""
        return self._events.check(length, digest)

    def truncate_metrics(self, length: int) -> None:
        """Back to the length that a checkpoint names; 0 for a run that starts."""
        self._events.truncate(length)

    def write_json(self, path: Path, value: Any) -> None:
        write_atomically(path, json.dumps(value, indent=1).encode())


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The user's own settings first: a digest of another split says less than the seed that made it."""
    for key in sorted({*old, *new}, key=lambda key: (key.startswith("recorded."), key)):
        free = any(key == name or key.startswith(name + ".") for name in FREE_TO_CHANGE)
        if not free and old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


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
