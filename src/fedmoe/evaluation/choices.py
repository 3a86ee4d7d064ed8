"""What clients chose among their candidates, and whether it was right: on their own test data. Reads saved results.

Regret is what the best candidate in hindsight had over the one chosen. What federation is worth to a client is what the
chosen candidate has over the one that it would have had alone, `local`, both by the same rule.
"""

from typing import Any, NamedTuple

from fedmoe.evaluation.answers import RunRecord

ALONE = "local"  # the candidate that owes nothing to the others


class ClientChoice(NamedTuple):
    client: int
    unseen: bool
    chosen: str
    best: str  # in hindsight, by accuracy and then by loss
    accuracy: float
    regret: float  # in accuracy
    loss_regret: float
    worth: float | None  # accuracy of the chosen less that of `local`; None without such a candidate


def choices(run: RunRecord) -> list[ClientChoice]:
    """By client; empty for an algorithm without candidates."""
    names = (run.get("answers") or {}).get("candidates", ())
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for score in run["scores"]:
        if score.get("answer") in names and score["data"] == "own" and score["model"] == "after":
            found.setdefault(score["client"], {})[score["answer"]] = score
    return [_of_client(client, scores) for client, scores in sorted(found.items()) if _chosen(scores)]


def _chosen(scores: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    return next((score for score in scores.values() if score.get("chosen")), None)


def _of_client(client: int, scores: dict[str, dict[str, Any]]) -> ClientChoice:
    chosen = _chosen(scores)
    assert chosen is not None
    best = max(scores.values(), key=lambda score: (score["accuracy"], -score["loss"]))
    alone = scores.get(ALONE)
    return ClientChoice(
        client,
        chosen["unseen"],
        chosen["answer"],
        best["answer"],
        chosen["accuracy"],
        best["accuracy"] - chosen["accuracy"],
        chosen["loss"] - min(score["loss"] for score in scores.values()),
        None if alone is None else chosen["accuracy"] - alone["accuracy"],
    )
