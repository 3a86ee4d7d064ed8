"""Tables of Peterson, Kanani and Marathe (2019) from stored runs: errors by user, stability of the shared model."""

import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from shared_model import level_of

Run = dict[str, Any]
METHODS = ("Local", "FedAvg", "Algorithm 1", "Algorithm 2")
ALONE = "–"  # nothing is sent, so there is no noise
LEVELS = (ALONE, "∞", "σ = 0", "4", "2", "σ = 2", "σ = 4")  # in the paper's order


def by_user(runs: Sequence[Run]) -> list[list[str]]:
    """The error of each user (Figure 5), or the accuracy over all of them (Figure 6): mean ± deviation over seeds."""
    users = sorted({score["client"] for score in runs[0]["scores"]})
    shown = users if len(users) == 2 else []
    table = [["noise", "method", "seeds", *(f"user {user + 1}" for user in shown), "all users", "between users"]]
    for level, title, found in by_level_and_method(runs):
        scores = [own_scores(run) for run in found]
        means = [fmean(own.values()) for own in scores]
        between = fmean(pstdev(own.values()) for own in scores)
        cells = [deviating([own[user] for own in scores]) for user in shown]
        table.append([level, title, str(len(found)), *cells, deviating(means), f"{between:.2f}"])
    return table


def own_scores(run: Run) -> dict[int, float]:
    """RMSE, or accuracy in percent, of what each user ends with on its own test data."""
    final = "after" if any(score["model"] == "after" for score in run["scores"]) else "before"
    own = [score for score in run["scores"] if score["data"] == "own" and score["model"] == final]
    return {
        score["client"]: score["metrics"]["rmse"] if is_regression(run) else 100 * score["accuracy"] for score in own
    }


def is_regression(run: Run) -> bool:
    return bool(run.get("task") == "regression")


def agreement(runs: Sequence[Run]) -> list[list[str]]:
    """P(two runs answer differently) over all pairs, and how often the shared model is right; mean ± deviation."""
    table = [["method", "ε", "runs", "P(ŷ₁ ≠ ŷ₂)", "accuracy"]]
    for level, title, found in sorted(by_level_and_method(runs), key=lambda row: METHODS.index(row[1])):
        asked = [run for run in found if "shared_answers" in run]
        if len(asked) < 2:
            continue
        differing = [
            fmean(one != other for one, other in zip(first["shared_answers"], second["shared_answers"], strict=True))
            for first, second in combinations(asked, 2)
        ]
        right = [run["shared_accuracy"] for run in asked]
        table.append([title, level, str(len(asked)), deviating(differing), deviating(right)])
    return table


def left_out(path: Path) -> list[list[str]]:
    """The same of runs in which one user each did not take part."""
    return agreement(json.loads(path.read_text(encoding="utf-8")))


def tried(folder: Path, pattern: str) -> list[list[str]]:
    """Every setting that was tried: its score, mean over folds and levels of noise. The best is bold."""
    table = [["experiment", "method", "noise", "setting", "score on held-out records", "runs"]]
    for path in sorted(folder.glob(pattern)):
        choice = json.loads(path.read_text(encoding="utf-8"))
        scores: dict[str, list[float]] = {}
        for row in choice["tried"]:
            names = [key for key in row if "." in key]
            words = ", ".join(f"{key.rpartition('.')[2]} = {row[key]:g}" for key in names)
            scores.setdefault(words, []).append(row["score"])
        means = {words: fmean(found) for words, found in scores.items()}
        percent = not choice["config"].endswith("synthetic")
        best = (max if percent else min)(means.values())
        for words, mean in means.items():
            text = f"{100 * mean:.1f}%" if percent else f"{mean:.2f}"
            shown = f"**{text}**" if mean == best else text
            facts = [path.stem.split("-")[0], choice["method"], ", ".join(choice["levels"]), words]
            table.append([*facts, shown, str(len(scores[words]))])
    return table


def by_level_and_method(runs: Sequence[Run]) -> Iterable[tuple[str, str, list[Run]]]:
    """Runs of the same kind, one per seed and user left out: who trains alone does so once for all levels."""
    found: dict[tuple[str, str], dict[Any, Run]] = {}
    for run in runs:
        title = run["title"].split(",")[0]
        level = ALONE if title == "Local" else run["level"] if "level" in run else level_of(run["config"])
        found.setdefault((level, title), {})[run["seed"], str(run.get("left_out"))] = run
    order = sorted(found, key=lambda key: (LEVELS.index(key[0]), METHODS.index(key[1])))
    return [(level, title, list(found[level, title].values())) for level, title in order]


def deviating(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {pstdev(values):.2f}"
