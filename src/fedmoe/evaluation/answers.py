"""Runs whose algorithm answers in several ways, read as if each way were a method. Reads saved results, no tensors.

The headline stands for the algorithm under its own title. The other answers follow after all headlines: answers that
were told a prior stand apart from those that were not. Candidates among which a client chose are no rows of a table.
"""

from collections.abc import Iterable
from typing import Any

RunRecord = dict[str, Any]  # one run, as stored in results.json
TOLD = ("own prior", "balanced prior")  # answers that were told how frequent labels are where they are scored


def with_headline(run: RunRecord) -> RunRecord:
    """The run with the scores of its headline alone."""
    return _only(run, (run.get("answers") or {}).get("headline", ""))


def by_answer(results: Iterable[RunRecord]) -> list[RunRecord]:
    """Headlines in the order of the runs, then every further answer under a title of its own."""
    runs = list(results)
    others = [
        {**_only(run, name), "title": f"{run['title']}, {name}" if name else f"{run['title']}, as it is"}
        for run in runs
        for name in _further(run)
    ]
    return [*map(with_headline, runs), *others]


def _further(run: RunRecord) -> list[str]:
    answers = run.get("answers") or {}
    apart = {answers.get("headline", ""), *answers.get("candidates", ())}
    return [name for name in dict.fromkeys(map(_answer, run["scores"])) if name not in apart]


def _only(run: RunRecord, name: str) -> RunRecord:
    return {**run, "answer": name, "scores": [score for score in run["scores"] if _answer(score) == name]}


def _answer(score: dict[str, Any]) -> str:
    return str(score.get("answer", ""))
