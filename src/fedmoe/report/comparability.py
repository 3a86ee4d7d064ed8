"""Runs that were made one by one, read as one comparison: only what can be compared may share a table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmoe.errors import ConfigError
from fedmoe.evaluation.summary import RunRecord

# What may differ between two seeds of one method: it names them, or says how and not what is computed.
FREE = ("seed", "name", "engine", "compare")


def check_together(results: Sequence[RunRecord], folders: Sequence[Path]) -> None:
    """Refuse runs of one title that are not the same method, a seed that is there twice, and unequal data."""
    methods: dict[str, tuple[RunRecord, Path]] = {}
    seeds: dict[tuple[str, int], Path] = {}
    splits: dict[int, tuple[str, Path]] = {}
    for result, folder in zip(results, folders, strict=True):
        title, seed = result["title"], result["seed"]
        first, where = methods.setdefault(title, (result, folder))
        if unequal := sorted(set(differences(first["config"], result["config"]))):
            raise ConfigError(
                f"{where} and {folder} are both called {title!r}, but differ in {', '.join(unequal)}. "
                "Give one another name: --set algorithm.label=NAME."
            )
        if (title, seed) in seeds:
            raise ConfigError(f"{seeds[title, seed]} and {folder} are the same: {title!r} with seed {seed}. Name one.")
        seeds[title, seed] = folder
        digest, holder = splits.setdefault(seed, (result.get("split_digest", ""), folder))
        if digest != result.get("split_digest", ""):
            raise ConfigError(
                f"{holder} and {folder} have seed {seed} but saw different splits, so they cannot be compared. "
                "Report them apart."
            )


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs right below it, such as those of a comparison."""
    if (folder / "config.toml").exists() or not folder.is_dir():
        return [folder] if folder.is_dir() else []
    return sorted(path.parent for path in folder.glob("*/config.toml"))


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two configs differ, as paths: ``algorithm.num_experts``."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        if one != other:
            yield path
        return
    for key in sorted({*one, *other}):
        if path or key not in FREE:
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
