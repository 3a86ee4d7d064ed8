"""What clients chose among their candidates, what another choice would have given, and whom federation harms."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from fedmoe.evaluation.choices import ClientChoice, choices
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.methods import client_names

COLUMNS = ("Client", "Chosen", "Own accuracy", "Best in hindsight", "Regret", "Worth of federation")


class ChoiceSection(NamedTuple):
    """What the clients of one run chose: cells by row, and a note below."""

    title: str
    rows: list[list[str]]
    note: str
    columns: tuple[str, ...] = COLUMNS


def choice_sections(results: Sequence[RunRecord]) -> list[ChoiceSection]:
    """Of each run whose clients chose among candidates."""
    return [
        ChoiceSection(f"{run['title']}, seed {run['seed']}", list(_rows(run, found)), _note(run, found))
        for run in results
        if (found := choices(run))
    ]


def choice_notes(results: Sequence[RunRecord]) -> list[str]:
    """For the foot of tables: means, and the clients that would do better alone."""
    return [f"{run['title']}, seed {run['seed']}: {_words(run, found)}" for run in results if (found := choices(run))]


def _rows(run: RunRecord, found: Sequence[ClientChoice]) -> Iterator[list[str]]:
    names = client_names(run)
    for one in found:
        worth = "–" if one.worth is None else f"{100 * one.worth:+.1f}"
        numbers = f"{100 * one.accuracy:.1f}", one.best, f"{100 * one.regret:.1f}", worth
        yield [names.get(one.client, str(one.client)), one.chosen, *numbers]


def _note(run: RunRecord, found: Sequence[ClientChoice]) -> str:
    explained = (
        "Each client chooses on validation data that nothing was fitted on. Regret: points of accuracy, on its own "
        "test data, that the best candidate has over the chosen one. Worth of federation: points that the chosen one "
        "has over the client's model of its own data alone, by the same rule."
    )
    words = _words(run, found)
    return f"{words[0].upper()}{words[1:]} {explained}"


def _words(run: RunRecord, found: Sequence[ClientChoice]) -> str:
    chosen = ", ".join(f"{name} {count}" for name, count in Counter(one.chosen for one in found).most_common())
    harmed = [one for one in found if one.worth is not None and one.worth < 0]
    names = client_names(run)
    shown = ", ".join(f"{names.get(one.client, str(one.client))} ({100 * (one.worth or 0):+.1f})" for one in harmed)
    worth = [one.worth for one in found if one.worth is not None]
    gain = f" Federation is worth {100 * fmean(worth):+.1f} points to a client in the mean." if worth else ""
    return (
        f"clients chose {chosen}; mean regret {100 * fmean(one.regret for one in found):.1f} points."
        f"{gain} {f'Better off alone: {shown}.' if harmed else 'No client would be better off alone.'}"
    )
