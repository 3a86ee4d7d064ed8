"""Tables and pages of a grid: our numbers at each point, and beside them those of a paper where there are any."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedmoe.errors import RunError
from fedmoe.evaluation.claims import Model, Part, by_seed
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord, interval
from fedmoe.report.figures import Figure
from fedmoe.report.methods import group
from fedmoe.report.page import PARTS, made_by, page
from fedmoe.report.runs import StoredRun
from fedmoe.storage.files import make_private_folder, write_atomically

Point = tuple[tuple[str, Any], ...]  # settings and their values


class GridPoint(NamedTuple):
    point: Point
    runs: list[StoredRun]

    @property
    def results(self) -> list[RunRecord]:
        return [run.results for run in self.runs]


class Entry(NamedTuple):
    """One cell of a table, as text: ours, and the paper's as printed and as corrected."""

    ours: str
    seeds: int
    published: str = ""
    corrected: str = ""


class PartTable(NamedTuple):
    """Scores of one kind: a row for each point, an entry for each method."""

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


def part_tables(points: Sequence[GridPoint], paper: PaperPart | None = None) -> list[PartTable]:
    results = [run for point in points for run in point.results]
    methods = [method.title for method in group(results, every_answer=True)]
    model: Model = paper.model if paper else "final"
    tables = []
    for part, title in PARTS.items():
        rows = [
            (values_of(point.point), [_entry(point, title_, part, model, paper) for title_ in methods])  # type: ignore[arg-type]
            for point in points
        ]
        if any(entry.ours != "–" for _, entries in rows for entry in entries):
            keys = [key for key, _ in points[0].point]
            tables.append(PartTable(part, title, keys, methods, rows))  # type: ignore[arg-type]
    return tables


def values_of(point: Point) -> list[str]:
    return [str(value) for _, value in point]


def _entry(point: GridPoint, title: str, part: Part, model: Model, paper: PaperPart | None) -> Entry:
    merit = figure_of(point.results)
    means = list(by_seed(point.results, title, part, model).values())
    half = interval(means)
    ours = "–" if not means else merit.text(fmean(means)) + ("" if half is None else f" ± {merit.text(half)}")
    if paper is None:
        return Entry(ours, len(means))
    key = (part, tuple(values_of(point.point)), title)
    printed, corrected = (f"{table[key]:g}" if key in table else "" for table in (paper.published, paper.corrected))
    return Entry(ours, len(means), printed, corrected)


def grid_figure(points: Sequence[GridPoint], model: Model = "final") -> Figure | None:
    """Scores over the first setting whose values are numbers; a line for each method and combination of the others."""
    axis = next((i for i, (_, value) in enumerate(points[0].point) if _number(value) is not None), None)
    if axis is None or len({point.point[axis][1] for point in points}) < 2:
        return None
    results = [run for point in points for run in point.results]
    merit, methods = figure_of(results), group(results, every_answer=True)
    views = []
    for part, title in PARTS.items():
        series: dict[str, dict[str, Any]] = {}
        for point in points:
            others = ", ".join(f"{key.rpartition('.')[2]} = {v}" for i, (key, v) in enumerate(point.point) if i != axis)
            for method in methods:
                means = by_seed(point.results, method.title, part, model)  # type: ignore[arg-type]
                if means:
                    name = f"{method.title}, {others}" if others else method.title
                    line = series.setdefault(name, {"name": name, "place": method.place, "points": []})
                    line["points"].append([_number(point.point[axis][1]), round(fmean(means.values()), 4)])
        if series:
            for line in series.values():
                line["points"].sort()
            axes = {"label": title, "x": points[0].point[axis][0], "y": f"{merit.name}: {title.lower()}"}
            views.append({**axes, "percent": merit.percent, "dots": True, "series": list(series.values())})
            if "FedAvg" in series and merit.percent:
                shares = [line for name, line in _shares(series, "FedAvg").items() if name != "FedAvg"]
                words = f"{title}, as a share of FedAvg's"
                views.append({**axes, "label": words, "y": words, "percent": True, "dots": True, "series": shares})
    alt = "The same numbers as in the tables."
    title = f"{merit.name} over {points[0].point[axis][0]}"
    return Figure("grid", title, "Mean over clients and seeds.", alt, "lines", {"views": views}) if views else None


def _shares(series: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, dict[str, Any]]:
    """Every line divided by that of the base, where both have a point."""
    of_base = {x: y for x, y in series[base]["points"] if y}
    return {
        name: {**line, "points": [[x, round(y / of_base[x], 4)] for x, y in line["points"] if x in of_base]}
        for name, line in series.items()
    }


def own_against_global(points: Sequence[GridPoint], model: Model = "final") -> Figure | None:
    """Where each method stands at each point of the grid: at home, and on everyone's data."""
    results = [run for point in points for run in point.results]
    merit, shown = figure_of(results), []
    for point in points:
        for method in group(results, every_answer=True):
            own, everyone = (by_seed(point.results, method.title, part, model).values() for part in ("own", "global"))
            if own and everyone:
                name = " ".join([method.title, *values_of(point.point)])
                at = {"x": round(fmean(everyone), 4), "y": round(fmean(own), 4), "x_half": 0.0, "y_half": 0.0}
                shown.append({"name": name, "place": method.place, **at})
    axes = {"x": f"{merit.name} on the global test", "y": f"{merit.name} on clients' own test data"}
    caption = "One dot for each method and point of the grid; mean over clients and seeds."
    title, alt = "At home and everywhere", "The same numbers as in the tables."
    return Figure("own-against-global", title, caption, alt, "points", {**axes, "points": shown}) if shown else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def render_grid(points: Sequence[GridPoint], title: str, problems: Sequence[str], paper: PaperPart | None) -> str:
    results = [run for point in points for run in point.results]
    merit = figure_of(results)
    model: Model = paper.model if paper else "final"
    drawn = [figure for figure in (grid_figure(points, model), own_against_global(points, model)) if figure]
    data = {
        "merit": {"name": merit.name, "percent": merit.percent, "higher": merit.higher_is_better},
        "methods": [method.title for method in group(results, every_answer=True)],
        "figures": {figure.name: {"kind": figure.kind, **figure.data} for figure in drawn},
    }
    tables = part_tables(points, paper)
    return page(
        "grid.html", data, title=title, tables=tables, figures=drawn, paper=paper, problems=problems,
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
    for table in part_tables(points, paper):
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
