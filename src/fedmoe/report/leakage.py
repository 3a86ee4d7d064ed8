"""What an audit found that a server could read of clients' label distributions (Reisser et al. 2021, appendix C)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedmoe.report.figures import Figure
from fedmoe.report.runs import StoredRun

MOST_CLIENTS = 40  # in the picture
NUMBERS = ("mean", "nearest", "farthest")


class LeakageSection(NamedTuple):
    lines: list[tuple[str, list[str]]]  # method; attack, round, distances
    figures: list[Figure]


def leakage_section(audited: Sequence[tuple[str, StoredRun]]) -> LeakageSection | None:
    """Runs by what they are called; those that were not audited are left out."""
    known = [(title, run) for title, run in audited if run.labels_audit]
    if not known:
        return None
    lines = [
        (title, [row["attack"], str(row["round"]), *(f"{row[key]:.3f}" for key in NUMBERS)])
        for title, run in known
        for row in (*run.labels_audit["attacks"], _guess(run))
    ]
    return LeakageSection(lines, [_picture(place, title, run) for place, (title, run) in enumerate(known)])


def _guess(run: StoredRun) -> dict[str, Any]:
    return {"attack": "a uniform guess", "round": "–", **run.labels_audit["uniform_guess"]}


def _picture(place: int, title: str, run: StoredRun) -> Figure:
    """The true shares of labels and what each attack read, client by client: the slider goes through them."""
    audit = run.labels_audit
    clients = list(audit["truth"])[:MOST_CLIENTS]
    frames = [
        {"label": f"{row['attack']}, round {row['round']}", "values": [row["clients"].get(c, []) for c in clients]}
        for row in audit["attacks"]
    ]
    frames.append({"label": "the truth", "values": [audit["truth"][client] for client in clients]})
    classes = list(run.results.get("class_names") or range(audit["num_classes"]))
    data = {
        "rows": clients, "columns": classes, "row": "Client", "column": "Class", "value": "share of labels",
        "frames": [_shares_of(frame) for frame in frames],
    }  # fmt: skip
    best = min(audit["attacks"], key=lambda row: float(row["mean"]))
    alt = f"Nearest to the truth: {best['attack']}, {best['mean']:.3f} away in the mean."
    caption = "Shares of labels, client by client: the truth, and by the slider what each attack reads."
    return Figure(f"labels-read-{place}", f"{title}: labels and what is read of them", caption, alt, "heat", data)


def _shares_of(frame: dict[str, Any]) -> dict[str, Any]:
    """A reading may fall outside of what a share can be."""
    return {**frame, "values": [[round(min(1.0, max(0.0, v)), 3) for v in row] for row in frame["values"]]}
