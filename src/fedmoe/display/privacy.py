"""The privacy ledger in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fedmoe.privacy_report import PrivacyReport

if TYPE_CHECKING:
    from fedmoe.canary_audit import CanaryAudit
from fedmoe.private_steps import Charge


def privacy_table(report: PrivacyReport) -> Table:
    """One row per client; where nothing is guaranteed the reason, and no number that could be taken for a guarantee."""
    if report.no_guarantee:
        table = Table(show_header=False, box=None)
        table.add_row(f"[bold]no guarantee[/bold]: {escape(report.no_guarantee)}.")
        return table
    facts = report.facts
    table = Table(
        title=f"privacy spent, at delta = {facts['delta']:g}",
        caption=f"neighbours: {facts['relation']}; noise: {facts['noise_source']}; epsilon by PLD, beside it by RDP "
        "(an upper bound of it). Scores that clients are asked for are not part of it.",
    )
    for column in ("client", "steps", "sampling rate", "noise multiplier", "sensitivity", "epsilon", "by RDP"):
        table.add_column(column, justify="right")
    for one in report.spent:
        cells = (_each(one.charges, name) for name in ("sampling_rate", "noise_multiplier", "sensitivity"))
        table.add_row(str(one.client), str(one.steps), *cells, f"{one.epsilon:.3f}", f"{one.rdp_epsilon:.3f}")
    return table


def canary_table(found: "CanaryAudit") -> Table:
    """The attack's lower bound beside the ledger's upper bound."""
    table = Table(
        title=f"{found.canaries} canaries: {found.right} of {found.guesses} coins guessed right",
        caption=f"lower bounds hold with {found.confidence:.0%} confidence",
    )
    for column in ("epsilon is", "", "says"):
        table.add_column(column)
    upper = "no guarantee" if found.upper is None else f"{found.upper:.3f}"
    table.add_row("at least", f"{found.lower:.3f}", "the attack")
    table.add_row("at most", upper, "the ledger" + (f": {escape(found.no_guarantee)}" if found.no_guarantee else ""))
    table.add_row("provable", f"{found.largest:.3f}", "what so many canaries could show, were every guess right")
    return table


def _each(charges: Sequence[Charge], name: str) -> str:
    """Of the noised steps; label counts, which are charged once, are named beside them."""
    values = dict.fromkeys(f"{getattr(c, name):.4g}" + (" (labels)" * (c.kind == "label_counts")) for c in charges)
    return ", ".join(values)
