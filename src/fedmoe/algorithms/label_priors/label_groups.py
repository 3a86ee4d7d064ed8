"""What a user must know of label frequencies before a run: who has none, and which labels never meet on a client."""

from collections.abc import Collection, Iterable

from fedmoe.clients.federation import Federation
from fedmoe.core_types import ClientId

MOST_CLIENTS = 500  # that are looked at: with more, labels hardly fall apart


def label_groups(label_sets: Iterable[Iterable[int]]) -> list[list[int]]:
    """Labels that are linked by clients that hold two of them, in groups.

    >>> label_groups([{0, 1}, {2, 3}, {3, 4}])
    [[0, 1], [2, 3, 4]]
    """
    groups: list[set[int]] = []
    for labels in map(set, label_sets):
        linked = [group for group in groups if group & labels]
        groups = [group for group in groups if not group & labels]
        groups += [labels.union(*linked)] if labels else []
    return sorted(map(sorted, groups))


def prior_notes(federation: Federation, unlabelled: Collection[ClientId], *, fits_together: bool) -> list[str]:
    """`unlabelled` are new clients without labels; whether clients fit a calibration together."""
    notes = []
    if unlabelled:
        names = ", ".join(map(federation.name_of, sorted(unlabelled)[:3]))
        notes.append(
            f"{len(unlabelled)} clients have no labels ({names}…): their label frequencies start from even ones."
        )
    clients = map(int, federation.participants[:MOST_CLIENTS])
    groups = label_groups(federation.class_counts(client).nonzero()[:, 0].tolist() for client in clients)
    if fits_together and len(groups) > 1:
        known = federation.class_names
        first, second = (known[group[0]] if known else str(group[0]) for group in groups[:2])
        notes.append(
            f"the labels fall apart into {len(groups)} groups that no client holds together, such as {first!r} and "
            f"{second!r}: clients cannot tell how likely one is beside the other, and the calibration's ridge decides."
        )
    return notes
