"""What a paper printed, as a small file: which runs make a table or figure, its numbers, and the claims to decide.

The files are in configs/reproduce/, one for each table or figure. `config` is an ordinary config, `grid` its sweep.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmoe.config_errors import nearest
from fedmoe.errors import ConfigError
from fedmoe.evaluation.claims import Difference, Model, Part, decide, paired_difference
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.report.grid import GridPoint, words_of
from fedmoe.report.sweep import PaperPart
from fedmoe.sweeps.plan import Cell, as_toml, plan
from fedmoe.sweeps.preparation import with_common_expert

HOME_VARIABLE = "FEDMOE_CONFIGS"
QUICK_EPOCHS = 20  # of a common expert


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Published(Section):
    """One printed table: for each point of the grid, its values in the order of `methods`, in percent."""

    part: Part
    methods: tuple[str, ...]
    rows: tuple[tuple[tuple[Any, ...], tuple[float, ...]], ...]  # ((values of the point), (numbers))
    corrected: tuple[tuple[tuple[Any, ...], tuple[float, ...]], ...] = ()
    reason: str = ""  # why: a footnote


class Claim(Section):
    """`method` is ahead of `than`; with a margin, in points, the two are on par."""

    says: str
    method: str
    than: str
    part: Part = "own"
    margin: float | None = None


class Reproduction(Section):
    paper: str
    figure: str
    title: str
    source: str  # authors, year, table
    config: str  # a path, relative to this file
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    set: tuple[str, ...] = ()  # changes to the config, as --set takes them
    extra: tuple[tuple[str, ...], ...] = ()  # further runs at every point, each with changes of its own: a wider model
    runs_of: str | None = None  # another figure of the paper, whose folder the runs are in: equal ones are made once
    pretrain_epochs: int | None = None  # of a common expert for each seed, on public rows; `{common}` is its file
    quick: str  # a config of the same algorithms on data that is always there, a matter of seconds
    quick_grid: dict[str, tuple[Any, ...]] | None = None  # default: the last point of the grid
    model: Model = "final"
    audit: Literal["labels"] | None = None  # of every run, when it is finished
    metric: Literal["right_choice"] | None = None  # what the numbers are, where they are not accuracies or errors
    differs: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    claims: tuple[Claim, ...] = ()
    path: Path = Path()

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.figure}"

    def cells(self, directory: Path, seeds: Sequence[int], *, quick: bool = False) -> list[Cell]:
        """Quick: one point, on the small config."""
        home = self._folder(directory, self.runs_of or self.figure, quick=quick)
        if quick:
            last = {key: values[-1:] for key, values in self.grid.items()}
            grid = last if self.quick_grid is None else self.quick_grid
            return self._planned(self.quick, grid, seeds, home, (), quick=True)
        return [
            cell
            for changes in ((), *self.extra)
            for cell in self._planned(self.config, self.grid, seeds, home, (*self.set, *changes))
        ]

    def epochs(self, *, quick: bool) -> int | None:
        """Of a common expert; None where there is none."""
        return QUICK_EPOCHS if quick and self.pretrain_epochs else self.pretrain_epochs

    def _planned(
        self,
        config: str,
        grid: Mapping[str, Sequence[Any]],
        seeds: Sequence[int],
        home: Path,
        changes: Sequence[str],
        *,
        quick: bool = False,
    ) -> list[Cell]:
        cells = plan(self.path.parent / config, grid, seeds, home, changes)
        epochs = self.epochs(quick=quick)
        return [with_common_expert(cell, home.parent, epochs) for cell in cells] if epochs else cells

    def folder(self, directory: Path, *, quick: bool = False) -> Path:
        """Of its page."""
        return self._folder(directory, self.figure, quick=quick)

    def _folder(self, directory: Path, figure: str, *, quick: bool) -> Path:
        return directory / self.paper / (figure + "-quick" * quick)


def find(home: Path | None = None) -> list[Reproduction]:
    """Everything that can be reproduced, by paper and figure."""
    folder = home or configs_home()
    found = [read(path) for path in sorted(folder.glob("*.toml"))]
    if not found:
        raise ConfigError(
            f"{folder} holds nothing to reproduce. Run from a checkout, or set {HOME_VARIABLE} to its folder."
        )
    return found


def configs_home() -> Path:
    """configs/reproduce below the current folder, or of the checkout that this package lies in."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named)
    here = Path("configs") / "reproduce"
    return here if here.is_dir() else Path(__file__).resolve().parents[3] / here


def choose(found: Sequence[Reproduction], paper: str | None, figure: str | None) -> list[Reproduction]:
    """Those of a paper, or one of its figures; a name that nobody has is said with the nearest one."""
    if paper is None:
        return list(found)
    papers = sorted({one.paper for one in found})
    if paper not in papers:
        raise ConfigError(f"there is no paper {paper!r} to reproduce. {nearest(paper, papers)}")
    of_paper = [one for one in found if one.paper == paper]
    if figure is None:
        return of_paper
    figures = [one.figure for one in of_paper]
    if figure not in figures:
        raise ConfigError(f"paper {paper} has no {figure!r} to reproduce. {nearest(figure, figures)}")
    return [one for one in of_paper if one.figure == figure]


def read(path: Path) -> Reproduction:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        made = Reproduction.model_validate({**table, "path": path})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    for printed in made.published:
        for at, values in (*printed.rows, *printed.corrected):
            if len(at) != len(made.grid) or len(values) != len(printed.methods):
                raise ConfigError(f"{path}: the published row {list(at)} does not fit the grid or the methods.")
    return made


def beside(made: Reproduction, points: Sequence[GridPoint]) -> PaperPart:
    """The paper's part of the page: its numbers by cell, and its claims decided by our runs."""
    return PaperPart(
        source=made.source,
        published=_by_cell(made, "rows"),
        corrected=_by_cell(made, "corrected"),
        footnotes=[printed.reason for printed in made.published if printed.reason],
        differs=made.differs,
        claims=[_decided(claim, made, points) for claim in made.claims],
        model=made.model,
        metric=made.metric,
    )


def alone(made: Reproduction) -> PaperPart:
    """The same for runs that are not the paper's: how to read them, and nothing to hold against them."""
    return PaperPart(made.source, {}, {}, (), (), (), made.model, made.metric)


def _by_cell(made: Reproduction, rows: str) -> dict[tuple[Part, tuple[str, ...], str], float]:
    return {
        (printed.part, tuple(as_toml(value) for value in at), method): value
        for printed in made.published
        for at, values in getattr(printed, rows)
        for method, value in zip(printed.methods, values, strict=True)
    }


def _decided(claim: Claim, made: Reproduction, points: Sequence[GridPoint]) -> dict[str, Any]:
    lines = list(_lines(claim, made, points))
    ahead = "the whole 95% interval of the difference lies above zero"
    on_par = f"the whole 95% interval of the difference lies within ± {claim.margin:g} points" if claim.margin else ""
    how = (
        f"{claim.method} less {claim.than}, {claim.part} data, paired over seeds. Holds where {on_par or ahead}; "
        "fewer than four seeds: undecided."
    )
    return {"says": claim.says, "how": how, "lines": lines}


def _lines(claim: Claim, made: Reproduction, points: Sequence[GridPoint]) -> Iterator[Mapping[str, Any]]:
    for point in points:
        found = paired_difference(point.results, claim.method, claim.than, claim.part, made.model, made.metric)
        percent = figure_of(point.results, made.metric).percent
        margin = claim.margin if claim.margin is None or not percent else claim.margin / 100
        shown = _difference(found, 100 if percent else 1)
        yield {
            "at": words_of(point.point) or "–",
            "difference": shown,
            "seeds": found.seeds,
            "verdict": decide(found, margin),
        }


def _difference(found: Difference, scale: float) -> str:
    """
    >>> _difference(Difference(4, 0.012, 0.003), 100), _difference(Difference(1, -0.012, None), 100)
    ('+1.2 ± 0.3', '-1.2')
    """
    if found.mean is None:
        return "–"
    return f"{scale * found.mean:+.1f}" + ("" if found.half is None else f" ± {scale * found.half:.1f}")
