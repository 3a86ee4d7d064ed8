"""Finished runs as small JSON files: what each was, with which code and settings, and its scores by client."""

import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from recovered_groups import usage_of
from shared_model import facts_of

from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config import PATHS
from fedmoe.errors import RunError
from fedmoe.report.methods import thin
from fedmoe.storage.results import read_results

SCORE = ("client", "unseen", "model", "data", "accuracy", "loss", "examples", "metrics", "answer", "chosen")
KEPT = (
    "name", "title", "algorithm", "seed", "backend", "rounds", "model_weights", "split_digest", "versions", "traffic",
)  # fmt: skip
KEPT_IF_THERE = ("task", "answers", "privacy")
DIGITS = 5
MOST_ROUNDS = 200  # of what is known of every round

Run = dict[str, Any]


def store(into: Path, folders: Sequence[Path], commit: str, command: str | None = None) -> list[str]:
    """Folders are runs, or hold some at any depth, such as a sweep; returns a sentence for each that is left out.

    A run below a folder is named by its place there, `share=0.6/fedavg-seed0` as share=0.6+fedavg-seed0.json, so that
    the points of a grid keep apart.
    """
    into.mkdir(parents=True, exist_ok=True)
    left_out, taken = [], set()
    for name, folder in itertools.chain.from_iterable(map(named_runs, folders)):
        if name in taken:
            left_out.append(
                f"{folder}: a run called {name} is stored already. Store one of the two under another NAME."
            )
            continue
        try:
            results = read_results(folder)
        except RunError as error:
            left_out.append(str(error))
            continue
        taken.add(name)
        run = compact({**results, "command": command or results["command"]}, commit)
        run |= (usage_of(folder) or {}) | facts_of(folder)
        (into / f"{name}.json").write_text(one_line_per_key(run), encoding="utf-8")
    return left_out


def named_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    if (folder / "config.toml").exists() or not folder.is_dir():
        yield folder.name, folder
        return
    for config in sorted(folder.rglob("config.toml")):
        yield "+".join(config.parent.relative_to(folder).parts), config.parent


def compact(results: Run, commit: str) -> Run:
    divergence = divergence_of(results)
    return {
        **{key: results[key] for key in KEPT},
        **{key: results[key] for key in KEPT_IF_THERE if results.get(key)},
        "commit": commit,
        "command": portable(results["command"]),
        "config": without_folders(results["config"]),
        "curve": [rounded(point) for point in results.get("curve", ())],
        **({"divergence": divergence} if divergence else {}),
        "scores": score_table(results["scores"]),
    }


def score_table(scores: Sequence[Run]) -> list[Any]:
    """The names of the columns, then a row for each score; columns that no score has are left out.

    Metrics with a colon in their name are details, which are in the curve as means.
    """
    names = [key for key in SCORE if any(score.get(key) not in (None, "", {}) for score in scores)]
    rows = [{**score, "metrics": _without_details(score.get("metrics", {}))} for score in scores]
    return [names, *([rounded(row.get(key)) for key in names] for row in rows)]


def _without_details(metrics: Run) -> Run:
    return {name: value for name, value in metrics.items() if ":" not in name}


def divergence_of(results: Run) -> list[tuple[int, list[float | None]]]:
    """How far apart clients pulled each expert (Reisser et al. 2021, eq. 16 and 17), in some of the rounds."""
    found = [(event["round"], (event.get("experts") or {}).get("divergence")) for event in results.get("history", ())]
    return thin([(number, rounded(values)) for number, values in found if values], MOST_ROUNDS)


def portable(command: str) -> str:
    """Without the folder that one machine kept the run in."""
    words = shlex.split(command)
    return shlex.join(word for n, word in enumerate(words) if words[n - 1] != "--dir" and not word.startswith("--dir"))


def without_folders(config: Run) -> Run:
    """Files by their names alone."""
    named = dict(config)
    for section, key in PATHS:
        if isinstance(inner := named.get(section), dict) and isinstance(path := inner.get(key), str):
            named[section] = {**inner, key: PurePath(path).name}
    return named


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def one_line_per_key(run: Run) -> str:
    """Small, and still readable as a difference between two commits: long lists have a line for each entry."""
    lines = []
    for key, value in run.items():
        if isinstance(value, list) and len(value) > 2:
            entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            lines.append(f"{json.dumps(key)}: [\n  {entries}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def load(folder: Path, patterns: str) -> list[Run]:
    """In the order of the catalog, then of titles and seeds. Scores as `summarise` reads them."""
    paths = sorted({path for pattern in patterns.split(",") for path in folder.glob(pattern)})
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for run in runs:
        names, *rows = run["scores"]
        columns = (dict(zip(names, row, strict=True)) for row in rows)
        run["scores"] = [{key: value for key, value in row.items() if value is not None} for row in columns]
    order = list(CATALOG)
    return sorted(runs, key=lambda run: (order.index(run["algorithm"]), run["title"], run["seed"]))
