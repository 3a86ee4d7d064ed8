"""An audit of a stored run: what a curious but honest server could read of each client's label distribution.

One round is run again with the run's own seeds, weights and private states, through the same engine: from the start,
and after the newest checkpoint. For a client that was sampled then it is what the run's server saw; the others would
have sent the like. The attacks of `evaluation.label_leakage` read it, and the truth is the label distribution of the
opted-in training records. Nothing of the run is changed: private states are read from a copy.
Where clients keep their label frequencies out of what they learn, the same round is run without that, too: the leak of
plain FedAvg; and so is the calibration after the rounds, where there is one.
"""

import tempfile
from collections.abc import Iterator
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
from fedmoe.core_types import ClientId
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError, RunError
from fedmoe.evaluation.label_attacks import Attack, Observed, attacks_on, attacks_on_calibration, mean_slope
from fedmoe.evaluation.label_leakage import total_variation
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.resuming import newest_checkpoint, record_run, steps_in
from fedmoe.storage.checkpoints import Checkpoint
from fedmoe.storage.rundir import RunDirectory
from fedmoe.streams import numpy_stream


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
        run.write_json(run.labels_audit, found)
    return found


def _readings(opened: Opened, truth: dict[ClientId, Tensor]) -> list[dict[str, Any]]:
    """One for each round that is run again and each attack that finds something to read."""
    config = opened.parts.config
    starts = [None] if opened.checkpoint is None else [None, opened.checkpoint]
    runs = {"": opened}
    if getattr(config.algorithm.options(), "adjust", False):
        runs[", without adjustment"] = opened._replace(parts=_without_adjustment(opened.parts))
    num_classes, bias = opened.parts.federation.num_classes, _output_bias(opened.parts.expert)
    attacks = attacks_on(config.algorithm.options(), config.training.federated, bias, num_classes)
    readings = [
        _judge(f"{name}{how}", start.round + 1 if start else 1, attack, replies, truth)
        for start in starts
        for how, one in runs.items()
        for replies in _replay(one, start, sorted(truth))
        for name, attack in attacks.items()
    ]
    readings += _calibration_readings(opened, truth)
    if not any(reading["clients"] for reading in readings):
        raise RunError(
            f"{config.algorithm.name} sends no labels, no output layer and no q(z|s), which are what these "
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
    if checkpoint and checkpoint.round > (rounds := parts.config.schedule.rounds):  # of what comes after the rounds
        as_after_rounds = not parts.algorithm.keeps_client_state and parts.algorithm.release is None
        checkpoint = checkpoint._replace(round=rounds) if as_after_rounds else None
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


def _without_adjustment(parts: Parts) -> Parts:
    """The same run whose clients learn their label frequencies with everything else."""
    options = replace(parts.config.algorithm.options(), adjust=False)
    return replace(parts, algorithm=parts.config.algorithm.entry.factory(options, parts.setup))


def _calibration_readings(opened: Opened, truth: dict[ClientId, Tensor]) -> list[dict[str, Any]]:
    """Of the first exchange after the rounds, and of all of them together."""
    start = opened.checkpoint
    if start is None or start.round < opened.parts.config.schedule.rounds or not opened.parts.algorithm.after_rounds:
        return []
    sent: dict[ClientId, list[Observed]] = {}
    with _session_on_a_copy(opened.parts, opened.run, opened.run_id) as session:
        session.resume(start.round, start.server, steps_in(opened.run, start))
        for replies in session.replay_after_rounds(sorted(truth)):
            for client, update in replies.updates.items():
                sent.setdefault(client, []).append(Observed(replies.sent[client], update))
    first = {client: replies[0] for client, replies in sent.items()}
    number, attacks = start.round + 1, attacks_on_calibration()
    readings = [_judge(f"{name}, first", number, attack, first, truth) for name, attack in attacks.items()]
    if not any(reading["clients"] for reading in readings):
        return []  # exchanges of another kind
    every = {client: mean_slope(replies) for client, replies in sent.items()}
    return readings + [_judge(f"{name}, all", number, attack, every, truth) for name, attack in attacks.items()]


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
