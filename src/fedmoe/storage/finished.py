"""The mark of a finished run: digests of what it wrote, so that files that were altered since are not shown as results.

The mark is written last. A run without it, or with a file that has changed, scores its clients again: the last
checkpoint and the private states are there, so the numbers are the same.
"""

import hashlib
import json
from pathlib import Path

from fedmoe.storage.files import read_bytes, unwritable
from fedmoe.storage.rundir import RunDirectory

MARK = "finished.json"


def mark_finished(run: RunDirectory, run_id: str) -> None:
    run.write_json(run.path / MARK, {"run_id": run_id, "digests": _digests(run)})


def unmark_finished(run: RunDirectory) -> None:
    """Before a finished run goes on."""
    try:
        (run.path / MARK).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run.path / MARK, error) from error


def changed_since_finished(run: RunDirectory, run_id: str) -> list[str] | None:
    """Names of files that are not as the finished run left them; None where the run is not finished."""
    try:
        mark = json.loads(read_bytes(run.path / MARK))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return [MARK]
    if not isinstance(mark, dict) or mark.get("run_id") != run_id or not isinstance(mark.get("digests"), dict):
        return [MARK]
    left, found = mark["digests"], _digests(run)
    return sorted(name for name in left.keys() | found.keys() if left.get(name) != found.get(name))


def _digests(run: RunDirectory) -> dict[str, str]:
    marked = (run.results, run.manifest, run.metrics, run.federation, run.delivery, run.common_expert)
    return {path.name: digest for path in marked if (digest := _digest(path)) is not None}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()
    except FileNotFoundError:
        return None
