"""What a run has spent of its clients' privacy, read from its folder: ledgers and accountants, no tensors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe import accounting
from fedmoe.clients.privacy_ledger import PrivacyLedger, ledger_beside
from fedmoe.core_types import ClientId
from fedmoe.errors import RunError
from fedmoe.private_steps import Charge
from fedmoe.storage.rundir import RunDirectory

MECHANISM = ("sampling_rate", "noise_multiplier", "sensitivity")
SWITCHED_OFF = "privacy is switched off: the config has no section [privacy]"


class ClientSpending(NamedTuple):
    client: ClientId
    charges: tuple[Charge, ...]
    epsilon: float  # by PLD
    rdp_epsilon: float  # the cross-check, never below

    @property
    def steps(self) -> int:
        return sum(charge.steps for charge in self.charges if charge.kind == "gradient")


class PrivacyReport(NamedTuple):
    """Either a guarantee, a figure per client, or the reason why there is none; never both."""

    facts: dict[str, Any]
    spent: list[ClientSpending]
    no_guarantee: str | None

    @property
    def epsilon(self) -> float | None:
        """Of the client that spent most; None where nothing is guaranteed."""
        if self.no_guarantee:
            return None
        return max((one.epsilon for one in self.spent), default=0.0)

    def as_table(self) -> dict[str, Any]:
        """For results.json: what was promised, and what each client has spent of it."""
        clients = [
            {
                "client": one.client,
                "steps": one.steps,
                **{name: sorted({getattr(charge, name) for charge in one.charges}) for name in MECHANISM},
                "epsilon": one.epsilon,
                "rdp_epsilon": one.rdp_epsilon,
            }
            for one in self.spent
        ]
        facts = {name: self.facts[name] for name in ("delta", "relation", "noise_source")}
        return {**facts, "no_guarantee": self.no_guarantee, "clients": clients}


def privacy_of(folder: Path) -> PrivacyReport:
    """Of a run's folder, or of the one that a node of a Flower deployment keeps for a run, which is named by its id."""
    run = RunDirectory(folder)
    of_node = ledger_beside(folder / run.private_store.name)
    if of_node.exists():
        return read_ledger(of_node, folder.absolute().name)
    try:
        config = run.read_config()
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run (config.toml is missing). Name the folder of a run.") from None
    if "privacy" not in config:
        return PrivacyReport({}, [], SWITCHED_OFF)
    path = ledger_beside(run.private_store)
    if not path.exists() and config["engine"]["name"] == "flower":
        raise RunError(
            f"{folder} has no ledger: on Flower each node keeps its own. Ask there, with the folder that the node has "
            f"for this run: fedmoe privacy HOME/runs/{config['recorded']['run_id']}"
        )
    if not path.exists():
        raise RunError(f"{path} is missing: the run has spent nothing yet, or its ledger was removed.")
    return read_ledger(path, config["recorded"]["run_id"])


def read_ledger(path: Path, run_id: str) -> PrivacyReport:
    ledger = PrivacyLedger(path, run_id)
    try:
        facts, spent = ledger.facts, {client: tuple(ledger.charges(client)) for client in ledger.clients()}
    finally:
        ledger.close()
    reason = facts.get("no_guarantee")
    if reason:
        return PrivacyReport(facts, [], reason)
    epsilons = {charges: _epsilons(charges, facts["delta"]) for charges in set(spent.values())}  # many spent the same
    rows = [ClientSpending(client, charges, *epsilons[charges]) for client, charges in spent.items()]
    unnoised = any(math.isinf(row.epsilon) for row in rows)
    return PrivacyReport(facts, [] if unnoised else rows, "a step was taken without noise" if unnoised else None)


def _epsilons(charges: Sequence[Charge], delta: float) -> tuple[float, float]:
    return accounting.epsilon(charges, delta), accounting.rdp_epsilon(charges, delta)
