"""Runs that were made one by one, read as one comparison: only what can be compared may share a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe.errors import RunError
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.runs import StoredRun
from fedmoe.report.write import read_drawable

# What may differ between two seeds of one method: it names them, or says how and not what is computed.
FREE = ("seed", "name", "engine", "compare")


class Together(NamedTuple):
    """Runs that can share a page, and a sentence for each folder that cannot be part of it."""

    runs: list[StoredRun]
    problems: list[str]


def read_together(folders: Iterable[Path]) -> Together:
    """Every run that is whole and comparable with those before it; the others are named, and do not stop the rest."""
    runs: list[StoredRun] = []
    kept: list[Path] = []
    problems = []
    for folder in folders:
        try:
            run = read_drawable(folder)
        except RunError as error:
            problems.append(str(error))
            continue
        if reason := not_comparable(run.results, folder, [one.results for one in runs], kept):
            problems.append(reason)
        else:
            runs.append(run)
            kept.append(folder)
    return Together(in_order(runs), problems)


def in_order(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """As their comparison names them, whatever their folders are called: seed by seed, method by method."""
    return sorted(runs, key=lambda run: (run.results["seed"], _place(run.results["config"])))


def _place(config: Mapping[str, Any]) -> int:
    """Of the algorithm in `compare`, whose entries are names or tables; behind them all where it is not there."""
    own, compared = config.get("algorithm") or {}, config.get("compare") or []
    named = [{"name": one} if isinstance(one, str) else one for one in compared]
    of_it = [n for n, one in enumerate(named) if all(one.get(key) == own.get(key) for key in ("name", "label"))]
    return of_it[0] if of_it else len(named)


def title_of(runs: Sequence[StoredRun]) -> str:
    """What a page is called: the name of the run, or of the config that all runs come from."""
    if len(runs) == 1:
        name: str = runs[0].results["name"]
        return name
    names = {run.results["name"].split("/")[0].removesuffix("-comparison") for run in runs}
    return names.pop() if len(names) == 1 else "Runs"


def not_comparable(
    result: RunRecord, folder: Path, others: Sequence[RunRecord], their_folders: Sequence[Path]
) -> str | None:
    """Why a run cannot share a table with others: another method of the same title, the same seed, unequal data."""
    title, seed = result["title"], result["seed"]
    for other, where in zip(others, their_folders, strict=True):
        if other["title"] == title:
            if unequal := sorted(set(differences(other["config"], result["config"]))):
                return (
                    f"{folder} is left out: it and {where} are both called {title!r}, but differ in "
                    f"{', '.join(unequal)}. Give one another name: --set algorithm.label=NAME."
                )
            if other["seed"] == seed:
                return f"{folder} is left out: it is the same as {where}, {title!r} with seed {seed}. Name one of them."
        if other["seed"] == seed and other.get("split_digest", "") != result.get("split_digest", ""):
            return (
                f"{folder} is left out: it and {where} have seed {seed} but saw different splits, so they cannot be "
                "compared. Report them apart."
            )
    return None


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two configs differ, as paths: ``algorithm.num_experts``."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        if one != other:
            yield path
        return
    for key in sorted({*one, *other}):
        if path or key not in FREE:
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
