"""An attack on one's own privacy: `fedmoe audit canary CONFIG`.

A thousand records that no client has, canaries, are put into the clients' training data or left out, each by a coin.
The run is trained once. Its server, who sees every update, guesses the coins: it explains a client's updates by the
gradients that its canaries would have had. What it can guess bounds epsilon from below; the ledger bounds it from
above. If the two cross, there is less noise than the ledger says.
Shape suffixes: M canaries of a client, P parameters.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe import assembly, trees
from fedmoe.assembly import Parts
from fedmoe.clients.federation import ClientDataset, Federation, Records, examples
from fedmoe.clients.privacy_ledger import ledger_beside
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId, Examples
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError, RunError
from fedmoe.evaluation.canary_bound import best_bound, largest_bound
from fedmoe.privacy_report import read_ledger
from fedmoe.streams import torch_stream
from fedmoe.training.batch import Batch
from fedmoe.training.flat import Layout
from fedmoe.training.privacy import clipped, example_gradients

RUN_ID = "canary audit"
RIDGE = 0.1  # of the attack's regression, relative to the mean square of a canary's gradients
DEVIATION = 3.0  # of the numbers of a canary: far from where data that are scaled to 1 lie


class Canaries(NamedTuple):
    """Of one client."""

    rows: Examples
    included: Tensor  # (N,) bool: what the coins said


class CanaryAudit(NamedTuple):
    lower: float
    upper: float | None  # of the ledger; None where it guarantees nothing
    largest: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    no_guarantee: str | None


def audit_canaries(config: ExperimentConfig, num_canaries: int = 1000, confidence: float = 0.95) -> CanaryAudit:
    """Train once with canaries and attack; raises RunError where the attack proves more than the ledger allows."""
    if config.privacy is None:
        raise ConfigError("the config has no section [privacy]: there is no claim to audit.")
    plain = assembly.build(config)
    canaries = draw_canaries(plain.federation, num_canaries, config.seed)
    parts = assembly.build(config, federation=with_canaries(plain.federation, canaries))
    with tempfile.TemporaryDirectory(prefix="fedmoe-canary-") as folder:
        store = Path(folder) / "private.sqlite"
        scores = _attack(parts, canaries, store)
        report = read_ledger(ledger_beside(store), RUN_ID)
    scores_M = np.concatenate([scores[client].numpy() for client in canaries])
    included_M: NDArray[np.bool_] = np.concatenate([one.included.numpy() for one in canaries.values()])
    lower, guesses, right = best_bound(scores_M, included_M, config.privacy.delta, confidence)
    largest = largest_bound(num_canaries, config.privacy.delta, confidence)
    found = CanaryAudit(lower, report.epsilon, largest, confidence, num_canaries, guesses, right, report.no_guarantee)
    if found.upper is not None and lower > found.upper:
        raise RunError(
            f"the ledger claims epsilon = {found.upper:.3f}, but an attack with {num_canaries} canaries guessed "
            f"{right} of {guesses} coins, which proves at least {lower:.3f} with {confidence:.0%} confidence. The "
            "noise is not what the ledger says: do not rely on it."
        )
    return found


def draw_canaries(federation: Federation, count: int, seed: int) -> dict[ClientId, Canaries]:
    """Shared out evenly over the clients that take part; inputs and labels are drawn at random."""
    if federation.target_shape is not None or not federation.input_dtype.is_floating_point:
        raise ConfigError("canaries are random inputs with random labels: the audit needs real numbers and classes.")
    if count < 2:
        raise ConfigError(f"--canaries {count}: at least 2 are needed, and a thousand to prove something.")
    generator, found = torch_stream(seed, "canaries"), {}
    shares = np.array_split(np.arange(count), len(federation.participants))
    for client, some in zip(federation.participants, shares, strict=True):
        x = DEVIATION * torch.randn(len(some), *federation.input_shape, generator=generator)
        y = torch.randint(federation.num_classes, (len(some),), generator=generator)
        coins = torch.rand(len(some), generator=generator) < 0.5
        found[int(client)] = Canaries(examples(x, y), coins)
    return found


def with_canaries(federation: Federation, canaries: Mapping[ClientId, Canaries]) -> Federation:
    """Clients with those canaries in their training data for which the coin fell."""

    def load(client: ClientId) -> ClientDataset:
        own = federation.load(client)
        if client not in canaries:
            return own
        rows, included = canaries[client]
        train = examples(torch.cat([own.train.x, rows.x[included]]), torch.cat([own.train.y, rows.y[included]]))
        opted_in = torch.cat([own.train_opted_in, torch.ones(int(included.sum()), dtype=torch.bool)])
        return Records(train, own.validation, own.test, opted_in, own.validation_opted_in)

    return replace(federation, load=load)


def _attack(parts: Parts, canaries: Mapping[ClientId, Canaries], store: Path) -> dict[ClientId, Tensor]:
    """Of each canary, the share of its gradients in the client's updates over all rounds, by ridge regression."""
    if len(parts.algorithm.round) != 1 or parts.privacy is None:
        raise ConfigError(f"{parts.title} has no single exchange of models that could be audited.")
    (exchange,) = parts.algorithm.round
    equations = {client: Equations.of(len(one.included)) for client, one in canaries.items()}
    loss, mechanism = parts.setup.federated.loss(parts.expert), parts.privacy.mechanism

    def watched(server: Any, updates: Mapping[ClientId, Any], *rest: Any) -> Any:
        layout = Layout.of(trees.stack([server.model]))
        before_P = layout.pack(trees.stack([server.model]))
        for client in canaries.keys() & updates.keys():
            rows = canaries[client].rows
            batch = Batch(rows.x[None], rows.y[None], {}, training=True)
            grads = example_gradients("model", loss, {"model": layout}, {"model": before_P}, {}, batch)
            along_MP = clipped(grads, mechanism, layout)[0].double()
            moved_P = (before_P - layout.pack(trees.stack([updates[client].model])))[0].double()
            equations[client].add(along_MP, moved_P)
        return exchange.aggregate(server, updates, *rest)

    algorithm = parts.algorithm._replace(round=(exchange._replace(aggregate=watched),))
    with open_transport(replace(parts, algorithm=algorithm), store, RUN_ID) as transport:
        session = Session(replace(parts, algorithm=algorithm), transport)
        while not session.is_trained:
            session.next_round()
    return {client: one.solved() for client, one in equations.items()}


class Equations(NamedTuple):
    """Normal equations of a client: its updates as sums of its canaries' gradients."""

    overlaps_MM: Tensor
    moved_M: Tensor

    @classmethod
    def of(cls, count: int) -> "Equations":
        return cls(torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64))

    def add(self, gradients_MP: Tensor, moved_P: Tensor) -> None:
        self.overlaps_MM.add_(gradients_MP @ gradients_MP.T)
        self.moved_M.add_(gradients_MP @ moved_P)

    def solved(self) -> Tensor:
        diagonal = self.overlaps_MM.diagonal()
        ridge = RIDGE * diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny)
        eye = torch.eye(len(diagonal), dtype=torch.float64)
        shares_M: Tensor = torch.linalg.solve(self.overlaps_MM + ridge * eye, self.moved_M)
        return shares_M
