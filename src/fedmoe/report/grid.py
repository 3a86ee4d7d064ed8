"""Points of a grid: the settings that they differ in, and the runs that were made there."""

from typing import Any, NamedTuple

from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.runs import StoredRun

Point = tuple[tuple[str, Any], ...]  # settings and their values


class GridPoint(NamedTuple):
    point: Point
    runs: list[StoredRun]

    @property
    def results(self) -> list[RunRecord]:
        return [run.results for run in self.runs]


def values_of(point: Point) -> list[str]:
    return [str(value) for _, value in point]


def words_of(point: Point) -> str:
    """
    >>> words_of((("split.share", 0.6), ("seed", 1)))
    'share = 0.6, seed = 1'
    """
    return ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in point)
