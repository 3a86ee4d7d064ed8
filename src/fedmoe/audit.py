"""An audit of a stored run: what a curious but honest server could read of each client's label distribution.

One round is run again with the run's own seeds, weights and private states, through the same engine: from the start,
and after the newest checkpoint. For a client that was sampled then it is what the run's server saw; the others would
have sent the like. The attacks of `evaluation.label_leakage` read it, and the truth is the label distribution of the
opted-in training records. Nothing of the run is changed: private states are read from a copy.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import assembly
from fedmoe.assembly import Parts
from fedmoe.clients.federation import Federation
from fedmoe.clients.private_store import PrivateStore
from fedmoe.config import parse_config
from fedmoe.core_types import ClientId, Tensors, Tree
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError, RunError
from fedmoe.evaluation.label_leakage import (
    normalised_shares,
    shares_from_bias,
    shares_from_usage,
    step_length,
    total_variation,
)
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.resuming import newest_checkpoint, record_run, steps_in
from fedmoe.storage.checkpoints import Checkpoint
from fedmoe.storage.rundir import RunDirectory
from fedmoe.streams import numpy_stream
from fedmoe.training.settings import LocalTraining

LABELS_FILE = "audit_labels.json"


class Observed(NamedTuple):
    """What the server holds after one exchange with one client."""

    sent: Tree
    update: Tree


Attack = Callable[[Observed], Tensor | None]  # p(y|s) as read from a reply, or None where there is nothing to read


class Opened(NamedTuple):
    """A stored run: its parts, its id, and where its newest checkpoint left it."""

    parts: Parts
    run: RunDirectory
    run_id: str
    checkpoint: Checkpoint | None


def audit_labels(
    folder: Path,
    max_clients: int = 100,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
) -> dict[str, Any]:
    """Attack a run and write what came out into its folder. The user's own data and modules are given as for a run."""
    run = RunDirectory(folder)
    if not (folder / "config.toml").exists():
        raise RunError(f"{folder} holds no run (config.toml is missing). Name the folder of one, such as runs/digits.")
    with run.opened():
        opened, notes = _open(run, federation, expert, gate)
        clients, seed = opened.parts.federation, opened.parts.config.seed
        rng = numpy_stream(seed, "audited clients")
        drawn = rng.choice(clients.participants, min(max_clients, len(clients.participants)), False, shuffle=False)
        truth = {int(client): _label_shares(clients, int(client)) for client in sorted(drawn)}
        found = {
            "algorithm": opened.parts.config.algorithm.name,
            "num_classes": clients.num_classes,
            "notes": notes,
            "uniform_guess": _summary([total_variation(_uniform(shares), shares) for shares in truth.values()]),
            "truth": {str(client): shares.tolist() for client, shares in truth.items()},
            "attacks": _readings(opened, truth),
        }
        run.write_json(folder / LABELS_FILE, found)
    return found


def _readings(opened: Opened, truth: dict[ClientId, Tensor]) -> list[dict[str, Any]]:
    """One for each round that is run again and each attack that finds something to read."""
    config = opened.parts.config
    starts = [None] if opened.checkpoint is None else [None, opened.checkpoint]
    num_classes, bias = opened.parts.federation.num_classes, _output_bias(opened.parts.expert)
    attacks = attacks_on(config.algorithm.options(), config.training.federated, bias, num_classes)
    readings = [
        _judge(name, start.round + 1 if start else 1, attack, replies, truth)
        for start in starts
        for replies in _replay(opened, start, sorted(truth))
        for name, attack in attacks.items()
    ]
    if not any(reading["clients"] for reading in readings):
        raise RunError(
            f"{config.algorithm.name} sends no labels, no output bias and no q(z|s), which are what these "
            "attacks read. That is no proof that nothing else reveals labels."
        )
    return [reading for reading in readings if reading["clients"]]


def _open(
    run: RunDirectory, federation: Federation | None, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Opened, list[str]]:
    """The parts of the run, built again from its recorded config; and what was odd about its checkpoints."""
    table = run.read_config()
    recorded = table.pop("recorded")
    parts = assembly.build(parse_config(table), federation=federation, expert=expert, gate=gate)
    if parts.data_digest != recorded.get("split_digest"):
        raise RunError(
            f"{run.path} was trained on other data than its config gives now (split {recorded.get('split_digest')!r}, "
            f"not {parts.data_digest!r}). Bring the data back, or call fedmoe.audit.audit_labels with your data."
        )
    run_id = record_run(run, parts)  # which refuses other modules
    with _session_on_a_copy(parts, run, run_id) as session:
        checkpoint, notes = newest_checkpoint(run, run_id, session, set_aside=False)
    if checkpoint and checkpoint.round > parts.config.schedule.rounds:  # of what comes after the rounds
        checkpoint = None
    return Opened(parts, run, run_id, checkpoint), notes


def _output_bias(network: Network) -> str | None:
    try:
        return network.output_bias_name
    except ConfigError:
        return None


def _replay(opened: Opened, start: Checkpoint | None, clients: list[ClientId]) -> Iterator[dict[ClientId, Observed]]:
    """What the server receives in one round in which these clients take part, exchange by exchange."""
    with _session_on_a_copy(opened.parts, opened.run, opened.run_id) as session:
        if start:
            session.resume(start.round, start.server, steps_in(opened.run, start))
        for replies in session.replay(clients):
            yield {client: Observed(replies.sent[client], update) for client, update in replies.updates.items()}


@contextmanager
def _session_on_a_copy(parts: Parts, run: RunDirectory, run_id: str) -> Iterator[Session]:
    """Of the private states: what is computed here is thrown away."""
    engine = parts.config.engine.model_copy(update={"workers": 1})
    parts = replace(parts, config=parts.config.model_copy(update={"engine": engine}))
    with tempfile.TemporaryDirectory(prefix="fedmoe-audit-") as folder:
        store = Path(folder) / "private.sqlite"
        if run.private_store.exists():
            with closing(PrivateStore(run.private_store, run_id)) as theirs:
                theirs.copy_to(store)
        with open_transport(parts, store, run_id) as transport:
            yield Session(parts, transport)


def attacks_on(options: Any, plan: LocalTraining, output_bias: str | None, num_classes: int) -> dict[str, Attack]:
    """The attacks on an algorithm with these settings."""

    def scaled(reply: Observed) -> Tensor | None:
        change_C = bias_change(output_bias, reply)
        length = None if change_C is None else step_length(plan, float(reply.update.num_examples))
        return shares_from_bias(change_C, length) if change_C is not None and length else None

    def normalised(reply: Observed) -> Tensor | None:
        change_C = bias_change(output_bias, reply)
        return None if change_C is None else normalised_shares(change_C)

    def solved(reply: Observed) -> Tensor | None:
        reported = hasattr(reply.sent, "posterior") and hasattr(reply.update, "usage")
        return shares_from_usage(reply.sent.posterior, reply.update.usage) if reported else None

    def stated(reply: Observed) -> Tensor | None:
        labels = getattr(reply.update, "y", None)  # centralised training sends the records themselves
        return None if labels is None else torch.bincount(labels, minlength=num_classes).double() / len(labels)

    attacks: dict[str, Attack] = {
        "output bias, eq. 15": scaled,
        "output bias, normalised": normalised,
        "labels, sent as they are": stated,
    }
    # FedMix: q(z|s) reveals labels where q is conditioned on them; its plain mixture (eq. 3) has no q.
    about_labels = getattr(options, "condition", None) == "label" and options.objective == "variational"
    return attacks | ({"q(z|s) and phi": solved} if about_labels else {})


def bias_change(name: str | None, reply: Observed) -> Tensor | None:
    """How the client moved the output bias. Of several experts the sum: q(z|y) adds up to one over them, so that each
    example moves the sum as it would move a single model's bias."""
    for field in ("model", "experts"):
        before: Tensors = getattr(reply.sent, field, {})
        after: Tensors = getattr(reply.update, field, {})
        if name is None or name not in before or name not in after:
            continue
        if field == "model":
            return after[name] - before[name]
        places = [reply.sent.expert_ids.tolist().index(expert) for expert in reply.update.expert_ids.tolist()]
        return (after[name] - before[name][places]).sum(0)
    return None


def _label_shares(federation: Federation, client: ClientId) -> Tensor:
    y = federation.data([client], opted_in_only=True).train.y[0]
    return torch.bincount(y, minlength=federation.num_classes).double() / len(y)


def _uniform(shares_C: Tensor) -> Tensor:
    return torch.full_like(shares_C, 1 / len(shares_C))


def _judge(
    name: str, number: int, attack: Attack, replies: dict[ClientId, Observed], truth: dict[ClientId, Tensor]
) -> dict[str, Any]:
    read = {client: shares for client, reply in replies.items() if (shares := attack(reply)) is not None}
    distances = [total_variation(shares, truth[client]) for client, shares in read.items()]
    return {
        "attack": name,
        "round": number,
        **(_summary(distances) if distances else {}),
        "clients": {str(client): shares.tolist() for client, shares in read.items()},
    }


def _summary(distances: list[float]) -> dict[str, float]:
    """Total variation distance to the truth. The worst case of an attack, for the client, is where it comes nearest."""
    return {
        "mean": fmean(distances),
        "nearest": min(distances),
        "farthest": max(distances),
    }
