"""Client by client: what each one ends with, and whether training together was worth it for it."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.figures import DIGITS, Figure
from fedmoe.report.methods import ClientScores, Method, client_names, client_scores, group

ALONE = "local_only"
MOST_NAMED = 12


def client_table(results: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The scores of every client, by method and seed, in columns: the page holds them once for all of its figures."""
    table = []
    for method in group(results, every_answer=True):
        for run in method.runs:
            scores = client_scores(run)
            columns = {
                field: [_short(getattr(one, field)) for one in scores.values()] for field in ClientScores._fields
            }
            table.append({"place": method.place, "seed": run["seed"], "clients": list(scores), **columns})
    return table


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def names_of_clients(results: Sequence[RunRecord]) -> dict[int, str]:
    return {client: name for run in results for client, name in client_names(run).items()}


def strips(results: Sequence[RunRecord]) -> Figure | None:
    words, merit = [], figure_of(results)
    for method in group(results, every_answer=True):
        own = [s.own for run in method.runs for s in client_scores(run).values() if s.own is not None]
        if own:
            found = [merit.with_unit(v) for v in (min(own), max(own), fmean(own), merit.worst_decile(np.array(own)))]
            words.append("{}: {} to {}, mean {}, worst decile {}".format(method.title, *found))
    caption = (
        "One dot per client, on its own test data. Line: mean; dashed: mean of the worst tenth. A long tail to the "
        f"{'left' if merit.higher_is_better else 'right'} is clients that a method fails."
    )
    return (
        Figure("strips", "Every client", caption, "; ".join(words), "clients", {"chart": "strips"}) if words else None
    )


def own_global(results: Sequence[RunRecord]) -> Figure | None:
    if not any(s.own is not None and s.everyone is not None for r in results for s in client_scores(r).values()):
        return None
    caption = "One dot per client and method: what its model is worth at home, and on everyone's data."
    counts = [
        f"{m.title}: {len({c for r in m.runs for c in client_scores(r)})} clients"
        for m in group(results, every_answer=True)
    ]
    title = f"{figure_of(results).name} at home and everywhere, client by client"
    return Figure("own-global", title, caption, "; ".join(counts), "clients", {"chart": "own_global"})


class Worth(NamedTuple):
    """What a method is to the clients, compared with the reference on the same client and seed."""

    title: str
    clients: int
    gain: float  # mean
    harmed: int
    worst: list[tuple[str, float]]  # those that lose most: name, loss


class WorthTable(NamedTuple):
    """`reference` is training alone where a run of it is there; else the shared model, before personalisation."""

    reference: str
    alone: Method | None
    rows: list[Worth]


def worth(results: Sequence[RunRecord]) -> WorthTable:
    methods = group(results, every_answer=True)
    alone = next((method for method in methods if method.runs[0]["algorithm"] == ALONE), None)
    reference = "training alone" if alone else "the shared model before personalisation"
    rows = [found for method in methods if method is not alone and (found := _worth(method, alone))]
    return WorthTable(reference, alone, rows)


def _worth(method: Method, alone: Method | None) -> Worth | None:
    gains: list[tuple[float, str]] = []
    references = {run["seed"]: client_scores(run) for run in alone.runs} if alone else None
    several, sign = len(method.runs) > 1, 1 if figure_of(method.runs).higher_is_better else -1
    for run in method.runs:
        names = client_names(run)
        for client, scores in client_scores(run).items():
            base = (
                scores.before if references is None else references.get(run["seed"], {}).get(client, ClientScores()).own
            )
            if base is not None and scores.own is not None:
                name = names.get(client, str(client)) + (f" (seed {run['seed']})" if several else "")
                gains.append((sign * (scores.own - base), name))
    if not gains:
        return None
    harmed = sorted((gain, name) for gain, name in gains if gain < 0)
    worst = [(name, -gain) for gain, name in harmed[:MOST_NAMED]]
    return Worth(method.title, len(gains), fmean(gain for gain, _ in gains), len(harmed), worst)


def worth_figure(table: WorthTable) -> Figure | None:
    if not table.rows:
        return None
    alt = "; ".join(f"{row.title}: {row.harmed} of {row.clients} clients lose" for row in table.rows)
    caption = (
        f"One dot per client: across, {table.reference}; up, the method. Crosses below the line are clients it harms."
    )
    data = {"chart": "worth", "alone": None if table.alone is None else table.alone.place}
    return Figure("worth", "Gain of each client", caption, alt, "clients", data)
