"""Runs on disk as a report reads them: results, the manifest of what left the clients, and maps of experts over time.

A report is a function of these files alone, so the page at the end of a run and one made of its folder later are equal.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedmoe.errors import RunError
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.methods import thin
from fedmoe.storage.files import read_bytes
from fedmoe.storage.results import read_results
from fedmoe.storage.rundir import RunDirectory

MOST_MAPS = 40  # of the experts over time, evenly chosen


class StoredRun(NamedTuple):
    results: RunRecord
    manifest: Mapping[str, Any] = MappingProxyType({})
    expert_maps: Sequence[dict[str, Any]] = ()  # {"round", "of", "shares"}: q(z|row) after some of the rounds
    labels_audit: Mapping[str, Any] = MappingProxyType({})  # of a run that was audited


def read_run(folder: Path) -> StoredRun:
    """A finished run; what is missing or altered is named with its path."""
    results = read_results(folder)
    try:
        manifest = json.loads(read_bytes(folder / "manifest.json"))
        maps = _expert_maps(read_bytes(folder / "metrics.jsonl"))
        audit = RunDirectory(folder).labels_audit
        found = json.loads(read_bytes(audit)) if audit.exists() else {}
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} is not a whole run: {Path(error.filename).name} is missing. Run the same command again to write "
            "it anew, or leave this folder out."
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{folder}: manifest.json, metrics.jsonl or audit_labels.json is not as a run wrote it ({error}). Run the "
            "same command again to write it anew, or leave this folder out."
        ) from error
    return StoredRun(results, manifest, maps, found)


def _expert_maps(metrics: bytes) -> list[dict[str, Any]]:
    lines = [line for line in metrics.split(b"\n") if b'"assignment": {' in line]  # most have none: spare the parsing
    events = [json.loads(line) for line in thin(lines, MOST_MAPS)]
    return [{"round": event["round"], **event["experts"]["assignment"]} for event in events]


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs right below it, such as those of a comparison."""
    if (folder / "config.toml").exists() or not folder.is_dir():
        return [folder] if folder.is_dir() else []
    return sorted(path.parent for path in folder.glob("*/config.toml"))
