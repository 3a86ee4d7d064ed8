"""Tables and pages of a grid: our numbers at each point, and beside them those of a paper where there are any."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedmoe.errors import RunError
from fedmoe.evaluation.claims import Model, Part, by_seed
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import interval
from fedmoe.report.grid import GridPoint, values_of, words_of
from fedmoe.report.grid_figures import grid_figures
from fedmoe.report.leakage import leakage_section
from fedmoe.report.methods import group
from fedmoe.report.page import PARTS, made_by, page
from fedmoe.storage.files import make_private_folder, write_atomically


class Entry(NamedTuple):
    """One cell of a table, as text: ours, and the paper's as printed and as corrected."""

    ours: str
    seeds: int
    published: str = ""
    corrected: str = ""


class PartTable(NamedTuple):
    """Scores of one kind: a row for each point, an entry for each method (of `shown_tables` also the other way)."""

    part: Part
    title: str
    keys: list[str]
    methods: list[str]
    rows: list[tuple[list[str], list[Entry]]]


class PaperPart(NamedTuple):
    """What a page of a reproduction adds: see sweeps/reproduction.py, which makes it."""

    source: str
    published: Mapping[tuple[Part, tuple[str, ...], str], float]  # by part, values of the point, method; in percent
    corrected: Mapping[tuple[Part, tuple[str, ...], str], float]
    footnotes: Sequence[str]  # why values are corrected
    differs: Sequence[str]  # where our setting is not the paper's
    claims: Sequence[Mapping[str, Any]]  # {"says", "lines": [{"at", "difference", "seeds", "verdict"}]}
    model: Model = "final"
    metric: str | None = None  # what is compared, where it is not the figure of merit


def how_read(paper: PaperPart | None) -> tuple[Model, str | None]:
    """Which model of a client, and which of its scores."""
    return ("final", None) if paper is None else (paper.model, paper.metric)


def part_tables(points: Sequence[GridPoint], paper: PaperPart | None = None) -> list[PartTable]:
    results = [run for point in points for run in point.results]
    methods = [method.title for method in group(results, every_answer=True)]
    tables = []
    for part, title in PARTS.items():
        rows = [
            (values_of(point.point), [_entry(point, title_, part, paper) for title_ in methods])  # type: ignore[arg-type]
            for point in points
        ]
        if any(entry.ours != "–" for _, entries in rows for entry in entries):
            keys = [key for key, _ in points[0].point]
            tables.append(PartTable(part, title, keys, methods, rows))  # type: ignore[arg-type]
    return tables


def shown_tables(points: Sequence[GridPoint], paper: PaperPart | None = None) -> list[PartTable]:
    """As people read them: where the grid is a single point, one table with a row for each method."""
    tables = part_tables(points, paper)
    if not tables or tables[0].keys or len(tables[0].rows) != 1:
        return tables
    entries = zip(*(table.rows[0][1] for table in tables), strict=True)
    rows = [([method], list(of_method)) for method, of_method in zip(tables[0].methods, entries, strict=True)]
    return [PartTable("own", "All methods", ["Method"], [table.title for table in tables], rows)]


def _entry(point: GridPoint, title: str, part: Part, paper: PaperPart | None) -> Entry:
    model, metric = how_read(paper)
    merit = figure_of(point.results, metric)
    means = list(by_seed(point.results, title, part, model, metric).values())
    half = interval(means)
    ours = "–" if not means else merit.text(fmean(means)) + ("" if half is None else f" ± {merit.text(half)}")
    if paper is None:
        return Entry(ours, len(means))
    key = (part, tuple(values_of(point.point)), title)
    printed, corrected = (f"{table[key]:g}" if key in table else "" for table in (paper.published, paper.corrected))
    return Entry(ours, len(means), printed, corrected)


def render_grid(points: Sequence[GridPoint], title: str, problems: Sequence[str], paper: PaperPart | None) -> str:
    results = [run for point in points for run in point.results]
    model, metric = how_read(paper)
    merit = figure_of(results, metric)
    drawn = grid_figures(points, model, metric)
    leakage = leakage_section(
        [(f"{run.results['title']}, {words_of(point.point)}", run) for point in points for run in point.runs]
    )
    data = {
        "merit": {"name": merit.name, "percent": merit.percent, "higher": merit.higher_is_better},
        "methods": [method.title for method in group(results, every_answer=True)],
        "figures": {
            figure.name: {"kind": figure.kind, **figure.data}
            for figure in (*drawn, *(leakage.figures if leakage else ()))
        },
    }
    tables = shown_tables(points, paper)
    return page(
        "grid.html", data, title=title, tables=tables, figures=drawn, paper=paper, problems=problems, leakage=leakage,
        merit=merit, made_by=made_by(results), seeds=len({run["seed"] for run in results}),
    )  # fmt: skip


def write_grid(
    points: Sequence[GridPoint], folder: Path, title: str, problems: Sequence[str] = (), paper: PaperPart | None = None
) -> Path:
    """Write report.html and table.md of a grid; returns the path of the page."""
    if not points:
        raise RunError(f"{folder}: no cell of the sweep has come to its end, so there is nothing to report.")
    try:
        make_private_folder(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot hold a report: {error.strerror}. Choose another folder.") from error
    page_text = render_grid(points, title, problems, paper)
    write_atomically(folder / "report.html", page_text.encode(errors="replace"))
    write_atomically(folder / "table.md", markdown_grid(points, paper).encode(errors="replace"))
    return folder / "report.html"


def markdown_grid(points: Sequence[GridPoint], paper: PaperPart | None = None) -> str:
    """One table for each kind of score."""
    blocks = []
    for table in shown_tables(points, paper):
        head = [*table.keys, *table.methods]
        lines = [[*values, *map(entry_text, entries)] for values, entries in table.rows]
        rows = [head, ["---"] * len(head), *lines]
        shown = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        blocks.append(f"{table.title}\n\n{shown}")
    return "\n\n".join(blocks) + "\n"


def entry_text(entry: Entry) -> str:
    """
    >>> entry_text(Entry("44.9 ± 2.5", 4, "30.47")), entry_text(Entry("78.0", 1, "10.42", "79.2"))
    ('44.9 ± 2.5 (30.47)', '78.0 (10.42, corrected 79.2)')
    """
    beside = ", ".join(filter(None, (entry.published, f"corrected {entry.corrected}" if entry.corrected else "")))
    return f"{entry.ours} ({beside})" if beside else entry.ours
