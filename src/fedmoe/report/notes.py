"""What a reader of the table must know beside the numbers: the same in the terminal, table.md and the page."""

from collections.abc import Sequence
from typing import Any

from fedmoe.evaluation.answers import TOLD
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.choices import choice_notes
from fedmoe.report.methods import Method, group, weakest_clients


def notes(results: Sequence[RunRecord]) -> list[str]:
    methods = group(results)
    return [
        *_abandoned_rounds(results),
        *_ended_early(results),
        *_not_scored(methods),
        *_server_optimizers(methods),
        *_told_priors(results),
        *_weakest(methods),
        *choice_notes(results),
    ]


def _abandoned_rounds(results: Sequence[RunRecord]) -> list[str]:
    found = []
    for run in results:
        if abandoned := run.get("abandoned_rounds", 0):
            least = (run["config"].get("schedule") or {}).get("min_clients", 1)
            lacking = "no accepted update" if least == 1 else f"fewer than {least} accepted updates"
            found.append(
                f"Warning: {run['title']}, seed {run['seed']}: {abandoned} of {run['rounds']} rounds had {lacking}, "
                "so the model did not change in them."
            )
    return found


def _ended_early(results: Sequence[RunRecord]) -> list[str]:
    return [
        f"{run['title']}, seed {run['seed']}: the rounds ended after {stopped['round']} of {_planned(run)}, since "
        f"{stopped['reason']}."
        for run in results
        if (stopped := run.get("stopped"))
    ]


def _planned(run: RunRecord) -> Any:
    return (run["config"].get("schedule") or {}).get("rounds", "?")


def _not_scored(methods: Sequence[Method]) -> list[str]:
    unscored = [method.title for method in methods if not any(run["scores"] for run in method.runs)]
    return [f"No client was asked for scores and agreed to send them: {', '.join(unscored)}."] if unscored else []


def _server_optimizers(methods: Sequence[Method]) -> list[str]:
    """Only of methods that have such a setting: local training has no server to speak of."""
    found = {
        method.title: _describe(algorithm["server_optimizer"])
        for method in methods
        if "server_optimizer" in (algorithm := method.runs[0]["config"].get("algorithm") or {})
    }
    if len(set(found.values())) < 2:
        return []
    each = ", ".join(f"{title} {words}" for title, words in found.items())
    return [f"Server optimizers differ: {each}. schedule.server_optimizer sets one for all."]


def _told_priors(results: Sequence[RunRecord]) -> list[str]:
    found = {score.get("answer") for run in results for score in run["scores"]}
    if found.isdisjoint(TOLD):
        return []
    return [
        "Rows with own or balanced prior were told which labels to expect, those of the client or all alike. The "
        "others were not: an estimated prior is read off unlabelled questions."
    ]


def _describe(optimizer: dict[str, Any] | None) -> str:
    """SGD with rate 1 and no momentum is plain averaging, however it is written.

    >>> _describe(None), _describe({"name": "sgd"}), _describe({"name": "adam", "learning_rate": 0.001})
    ('averages', 'averages', 'adam (learning rate 0.001)')
    """
    if optimizer is None:
        return "averages"
    rate = optimizer.get("learning_rate")
    if optimizer["name"] == "sgd" and rate in (None, 1.0) and not optimizer.get("momentum"):
        return "averages"
    return f"{optimizer['name']}" + (f" (learning rate {rate:g})" if rate is not None else "")


def _weakest(methods: Sequence[Method]) -> list[str]:
    found = []
    for method in methods:
        if clients := weakest_clients(method):
            figure = figure_of(method.runs)
            worst = "Lowest" if figure.higher_is_better else f"Highest {figure.name}"
            each = ", ".join(f"{name} {figure.text(score)}" for name, score in clients)
            found.append(f"{worst} on own data, {method.title}: {each}.")
    return found
