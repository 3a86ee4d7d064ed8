"""Keeps what the published numbers were computed from, and writes the tables of the results pages from it.

    python benchmarks/results_page.py store NAME RUN... --commit SHA    # finished runs -> results/NAME/runs/*.json
    python benchmarks/results_page.py store NAME SWEEP --commit SHA     # every finished run below a folder
    python benchmarks/results_page.py write                             # every generated table and picture anew

A page marks the place of a table: `<!-- table: KIND runs/PATTERN -->`, the table, `<!-- /table -->`; kinds are below.
Several patterns are separated by commas. docs/results.md and README.md take runs of every folder, and name a file of
configs/reproduce/ after the pattern.
`<!-- picture: KIND runs/PATTERN -->` before an image is drawn from runs likewise (kinds: picture.py).
tests/test_results_pages.py compares the tables with the stored runs, so neither changes without the other.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import domain_expert_tables
import fedjets_tables
import prior_mixture_tables
import score_tables
from recovered_groups import HOW, recovered
from stored_runs import Run, load, store

from fedmoe.evaluation.answers import with_headline
from fedmoe.evaluation.summary import summarise
from fedmoe.report.grid import GridPoint
from fedmoe.report.runs import StoredRun
from fedmoe.report.sweep import Entry, entry_text, part_tables
from fedmoe.sweeps.reproduction import Reproduction, choose, find
from fedmoe.sweeps.reproduction import beside as paper_part

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
OVERVIEWS = (ROOT / "docs" / "results.md", ROOT / "README.md")  # pages beside results/, with tables of all of it
TABLE = re.compile(r"(<!-- table: (\w+) (\S+)((?: \S+)*) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
PICTURE = re.compile(r"<!-- picture: (\w+) (\S+) -->\s*!\[[^]]*\]\((\S+?)\)")

# Kinds of tables


def groups(folder: Path, pattern: str) -> list[list[str]]:
    """Adjusted Rand index of the clients' groups against the true ones, round by round; own accuracy in the end."""
    runs = load(folder, pattern)
    rounds = range(1, 1 + max(len(run["usage"]) for run in runs))
    table = [["K", "seed", "groups by", *map(str, rounds), "own accuracy in the end"]]
    for run in runs:
        facts = [str(run["config"]["algorithm"]["num_experts"]), str(run["seed"])]
        own = f"{100 * score_tables.mean_over_clients(run, 'own', 'accuracy'):.1f}"
        for how, indices in zip(HOW, recovered(run["groups"], run["usage"]), strict=True):
            table.append([*facts, how.replace("|", r"\|"), *(f"{index:.2f}" for index in indices), own])
            facts, own = [""] * len(facts), ""
    return table


def traffic(folder: Path, pattern: str) -> list[list[str]]:
    """Who sent how much where some opted out; mean accuracy in percent, before → after personalisation."""
    table = [
        ["opt_out", "clients that sent anything", "clients opted out", "bytes sent by clients", "own data", "global"]
    ]
    for run in load(folder, pattern):
        (row,) = summarise([run])
        counts = [f"{run['traffic'][key]:,}" for key in ("clients_that_sent", "opted_out_clients", "bytes_up")]
        opted_out = ", ".join(f"{key} = {value}" for key, value in run["config"]["opt_out"].items() if value)
        table.append([opted_out, *counts, score_tables.accuracy(row["own"]), score_tables.accuracy(row["global"])])
    return table


def stored(folder: Path, pattern: str) -> list[list[str]]:
    """Which folders hold the scores by client, and of which code."""
    table = [["folder", "runs stored", "commit", "backend"]]
    for path in sorted(page.parent for page in folder.glob("*/README.md")):
        runs = load(path, pattern)
        names = [", ".join(sorted({run[key] for run in runs})) or "–" for key in ("commit", "backend")]
        table.append([f"[`{path.name}`]({path.name}/README.md)", str(len(runs)), *names])
    return table


def points_of(made: Reproduction, runs: Sequence[Run]) -> list[GridPoint]:
    """Stored runs by their place in the grid of a reproduction."""
    found: dict[tuple[tuple[str, Any], ...], list[StoredRun]] = {}
    for run in runs:
        point = tuple((key, setting(run["config"], key)) for key in made.grid)
        found.setdefault(point, []).append(StoredRun(run))
    return [GridPoint(point, stored_runs) for point, stored_runs in sorted(found.items(), key=str)]


def as_published(folder: Path, pattern: str) -> list[Run]:
    """Without the further answers of methods: papers print one for each."""
    return [with_headline(run) for run in load(folder, pattern)]


def setting(config: Run, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def reproduction(name: str) -> Reproduction:
    return choose(find(ROOT / "configs" / "reproduce"), *name.split("/"))[0]


def beside(folder: Path, pattern: str, name: str) -> list[list[str]]:
    """Our mean ± 95% over seeds, and in brackets what the paper printed, at each point of one of its tables."""
    made = reproduction(name)
    points = points_of(made, as_published(folder, pattern))
    tables = part_tables(points, paper_part(made, points))
    head = ["scored on", *tables[0].keys, *(title.replace("|", r"\|") for title in tables[0].methods), "seeds"]
    rows = [
        [table.title.lower(), *values, *map(entry_text, entries), seeds_of(entries)]
        for table in tables
        for values, entries in table.rows
        if any(entry.seeds for entry in entries)
    ]
    return [head, *rows]


def seeds_of(entries: Sequence[Entry]) -> str:
    """How many: of the methods that were run, the fewest and the most."""
    counts = [entry.seeds for entry in entries if entry.seeds]
    return str(max(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def claims(folder: Path, pattern: str, name: str) -> list[list[str]]:
    """The claims of a paper, decided by the differences of runs with the same seed, in points."""
    made = reproduction(name)
    found = paper_part(made, points_of(made, as_published(folder, pattern))).claims
    lines = [[claim["says"], *(str(line[key]) for key in CLAIM)] for claim in found for line in claim["lines"]]
    return [["claim", *CLAIM], *lines]


def by_user(folder: Path, pattern: str) -> list[list[str]]:
    return domain_expert_tables.by_user(load(folder, pattern))


def agreement(folder: Path, pattern: str) -> list[list[str]]:
    return domain_expert_tables.agreement(load(folder, pattern))


def left_out(folder: Path, name: str) -> list[list[str]]:
    return domain_expert_tables.left_out(folder / name)


CLAIM = ("at", "difference", "seeds", "verdict")
KINDS: dict[str, Callable[..., list[list[str]]]] = {
    "beside": beside,
    "claims": claims,
    "methods": score_tables.methods,
    "brief": score_tables.brief,
    "answers": score_tables.answers,
    "choice": score_tables.choice,
    "seeds": score_tables.seeds,
    "less": score_tables.less,
    "groups": groups,
    "traffic": traffic,
    "stored": stored,
    "by_user": by_user,
    "agreement": agreement,
    "left_out": left_out,
    "tried": domain_expert_tables.tried,
    "expected": prior_mixture_tables.expected,
    "candidates": prior_mixture_tables.candidates,
    "tuning": fedjets_tables.tuning,
}


# Pages


def rendered(page: Path) -> str:
    """The text of a page with every generated table made anew."""

    def table(found: re.Match[str]) -> str:
        opening, kind, pattern, more, _, closing = found.groups()
        header, *rows = KINDS[kind](RESULTS if page in OVERVIEWS else page.parent, pattern, *more.split())
        lines = [header, ["---"] * len(header), *rows]
        return opening + "".join(f"| {' | '.join(line)} |\n" for line in lines) + closing

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def pictures(page: Path) -> dict[Path, str]:
    """The pictures of a page that are drawn from stored runs, by path."""
    from picture import PICTURES  # here, because tables need no matplotlib

    found = PICTURE.findall(page.read_text(encoding="utf-8"))
    return {page.parent / name: PICTURES[kind](load(page.parent, pattern)) for kind, pattern, name in found}


def pages() -> list[Path]:
    found = [*sorted(RESULTS.rglob("README.md")), *OVERVIEWS]
    return [page for page in found if TABLE.search(page.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    storing = verbs.add_parser("store")
    storing.add_argument("name")
    storing.add_argument("runs", nargs="+", type=Path)
    storing.add_argument("--commit", required=True, help="of the code that made the runs")
    storing.add_argument("--command", help="for runs that were started from Python")
    verbs.add_parser("write")
    asked = parser.parse_args()
    if asked.verb == "store":
        omitted = store(RESULTS / asked.name / "runs", asked.runs, asked.commit, asked.command)
        if omitted:
            parser.exit(2, "".join(f"{words}\n" for words in omitted))
    else:
        for page in pages():
            page.write_text(rendered(page), encoding="utf-8")
            for path, drawn in pictures(page).items():
                path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
