"""What a sweep came to: the runs at each point of its grid, and which cells are missing."""

from collections.abc import Mapping, Sequence

from fedmoe.errors import RunError
from fedmoe.report.grid import GridPoint
from fedmoe.report.write import read_drawable
from fedmoe.sweeps.plan import Cell, folder_of, is_finished


def gather(cells: Sequence[Cell], failures: Mapping[str, str] | None = None) -> tuple[list[GridPoint], list[str]]:
    """By point, in the order of the grid; a sentence for each cell that is not there (`failures`: why, by folder)."""
    points = {folder_of(cell.point): GridPoint(cell.point, []) for cell in cells}
    problems = []
    for cell in cells:
        try:
            if not is_finished(cell):
                unfinished = "it has not come to its end. Run the same command again to go on"
                why = (failures or {}).get(str(cell.directory), unfinished)
                raise RunError(f"{cell.directory}: {why}")
            points[folder_of(cell.point)].runs.append(read_drawable(cell.directory))
        except RunError as error:
            problems.append(str(error))
    return [point for point in points.values() if point.runs], problems
