"""An audit of a stored run: what a curious but honest server could read of each client's label distribution.

One round is run again with the run's own seeds, weights and private states, through the same engine: from the start,
and after the newest checkpoint. For a client that was sampled then it is what the run's server saw; the others would
have sent the like. The attacks of `evaluation.label_leakage` read it, and the truth is the label distribution of the
opted-in training records. Nothing of the run is changed: private states are read from a copy.
"""

import sqlite3
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import assembly
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig, parse_config
from fedmoe.core_types import ClientId, Tensors, Tree
from fedmoe.engines.embedded import start
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Coordinator
from fedmoe.engines.worker import Worker
from fedmoe.errors import ConfigError, RunError
from fedmoe.evaluation.label_leakage import (
    normalised_shares,
    shares_from_bias,
    shares_from_usage,
    step_length,
    total_variation,
)
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.storage.checkpoints import load_newest
from fedmoe.storage.rundir import RunDirectory
from fedmoe.streams import numpy_stream
from fedmoe.training.backends import cohort_size
from fedmoe.training.settings import LocalTraining

LABELS_FILE = "audit_labels.json"


class Reply(NamedTuple):
    """What the server holds after one exchange with one client."""

    sent: Tree
    update: Tree


Attack = Callable[[Reply], Tensor | None]  # p(y|s) as read from a reply, or None where there is nothing to read


class Opened(NamedTuple):
    config: ExperimentConfig
    federation: Federation
    algorithm: Algorithm
    output_bias: str | None  # None: the expert has no such thing
    cohort_size: int | Callable[[int], int]


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
        opened = _open(folder, federation, expert, gate)
        pool = opened.federation.participants
        rng = numpy_stream(opened.config.seed, "audited clients")
        drawn = rng.choice(pool, min(max_clients, len(pool)), replace=False, shuffle=False)
        truth = {int(client): _label_shares(opened.federation, int(client)) for client in sorted(drawn)}
        readings = _readings(opened, run, truth)
        found = {
            "algorithm": opened.config.algorithm.name,
            "num_classes": opened.federation.num_classes,
            "uniform_guess": _summary([total_variation(_uniform(shares), shares) for shares in truth.values()]),
            "truth": {str(client): shares.tolist() for client, shares in truth.items()},
            "attacks": readings,
        }
        run.write_json(folder / LABELS_FILE, found)
    return found


def _readings(opened: Opened, run: RunDirectory, truth: dict[ClientId, Tensor]) -> list[dict[str, Any]]:
    """One for each round that is run again and each attack that finds something to read."""
    starts = {1: opened.algorithm.init_server(opened.config.seed)}
    checkpoint, _ = load_newest(run.checkpoints, opened.algorithm.server_type)
    if checkpoint is not None:
        starts[checkpoint.round + 1] = checkpoint.server
    options, plan = opened.config.algorithm.options(), opened.config.training.federated
    attacks = attacks_on(options, plan, opened.output_bias)
    readings = [
        _judge(name, number, attack, replies, truth)
        for number, server in starts.items()
        for replies in _exchanges(opened, run, server, number, sorted(truth))
        for name, attack in attacks.items()
    ]
    if not any(reading["clients"] for reading in readings):
        raise RunError(
            f"{opened.config.algorithm.name} sends neither an output bias nor q(z|s), which are what these attacks "
            "read. That is no proof that nothing else tells about labels."
        )
    return [reading for reading in readings if reading["clients"]]


def _open(
    folder: Path, federation: Federation | None, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> Opened:
    """The parts of the run, built again from its recorded config."""
    try:
        table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{folder / 'config.toml'} cannot be read: {error}. Restore it.") from error
    digest = table.pop("split_digest", "")
    table.pop("versions", None)
    config = parse_config(table)
    federation = federation or assembly.build_federation(config).federation
    if federation.digest != digest:
        raise RunError(
            f"{folder} was trained on other data than its config gives now (split {digest!r}, not "
            f"{federation.digest!r}). Bring the data back, or call fedmoe.audit.audit_labels with your federation."
        )
    networks = assembly.build_networks(config.model, federation, expert, gate)
    backend = assembly.resolve_backend(config, networks)
    algorithm = assembly.build_algorithm(config, federation, networks, backend)
    return Opened(
        config,
        federation,
        algorithm,
        _output_bias(networks[0]),
        config.engine.cohort_size or cohort_size(networks, backend),
    )


def _output_bias(network: Network) -> str | None:
    try:
        return network.output_bias_name
    except ConfigError:
        return None


def _exchanges(
    opened: Opened, run: RunDirectory, server: Tree, round_number: int, clients: list[ClientId]
) -> Iterator[dict[ClientId, Reply]]:
    """What the server receives in one round in which these clients take part, exchange by exchange."""
    config = opened.config
    with tempfile.TemporaryDirectory(prefix="fedmoe-audit-") as folder:
        store = Path(folder) / "private.sqlite"
        if round_number > 1 and run.private_store.exists():
            _copy_store(run.private_store, store)
        worker = Worker(opened.algorithm, opened.federation, store, config.seed)
        with start(worker, 1) as transport:
            coordinator = Coordinator(
                opened.algorithm, opened.federation, transport, seed=config.seed, rounds=config.schedule.rounds,
                cohort_size=opened.cohort_size, manifest=Manifest(), max_update_norm=config.schedule.max_update_norm,
            )  # fmt: skip
            answers: dict[ClientId, list[Any]] = {client: [] for client in clients}
            for index, exchange in enumerate(opened.algorithm.round):
                replies = coordinator.exchange(server, "round", index, round_number, answers)
                yield {client: Reply(replies.sent[client], update) for client, update in replies.updates.items()}
                for client, update in replies.updates.items():
                    answers[client].append(update)
                server = exchange.aggregate(server, *replies[:3]) if replies.updates else server


def _copy_store(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as theirs, closing(sqlite3.connect(target)) as ours:
        theirs.backup(ours)


def attacks_on(options: Any, plan: LocalTraining, output_bias: str | None) -> dict[str, Attack]:
    """The attacks on an algorithm with these settings."""

    def scaled(reply: Reply) -> Tensor | None:
        change_C = bias_change(output_bias, reply)
        length = None if change_C is None else step_length(plan, float(reply.update.num_examples))
        return shares_from_bias(change_C, length) if change_C is not None and length else None

    def normalised(reply: Reply) -> Tensor | None:
        change_C = bias_change(output_bias, reply)
        return None if change_C is None else normalised_shares(change_C)

    def solved(reply: Reply) -> Tensor | None:
        told = hasattr(reply.sent, "posterior") and hasattr(reply.update, "usage")
        return shares_from_usage(reply.sent.posterior, reply.update.usage) if told else None

    attacks: dict[str, Attack] = {"output bias, eq. 15": scaled, "output bias, normalised": normalised}
    # FedMix: q(z|s) tells about labels where q is conditioned on them; its plain mixture (eq. 3) has no q.
    about_labels = getattr(options, "condition", None) == "label" and options.objective == "variational"
    return attacks | ({"q(z|s) and phi": solved} if about_labels else {})


def bias_change(name: str | None, reply: Reply) -> Tensor | None:
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
    name: str, number: int, attack: Attack, replies: dict[ClientId, Reply], truth: dict[ClientId, Tensor]
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
