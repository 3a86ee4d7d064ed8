"""A bad update is rejected, and the round goes on without it."""

from collections.abc import Callable
from pathlib import Path

import torch

from fedmoe import trees
from fedmoe.core_types import Tensors
from fedmoe.testing.federation import PARTICIPANTS, PLAIN, UNSEEN, tiny_federation
from fedmoe.testing.outcome import run_algorithm
from fedmoe.testing.subject import Subject, require
from fedmoe.testing.transports import Tamper


def with_nan(update: Tensors) -> Tensors:
    return {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in update.items()}


def with_other_shape(update: Tensors) -> Tensors:
    return {name: tensor[None].clone() for name, tensor in update.items()}


def with_other_names(update: Tensors) -> Tensors:
    return {f"my_{name}": tensor for name, tensor in update.items()}


def is_rejected(change: Callable[[Tensors], Tensors], reason: str) -> Callable[[Subject, Path], None]:
    """The check that an update so changed is rejected, with a reason that holds these words."""

    def check(subject: Subject, folder: Path) -> None:
        algorithm = subject.make()._replace(sample=lambda _server, _round, pool, _rng: pool)
        touched: list[bool] = []

        def changed(update: Tensors) -> Tensors:
            new = change(update)
            touched.append(any(tensor is not new.get(name) for name, tensor in update.items()))
            return new

        outcome = run_algorithm(
            algorithm,
            tiny_federation(),
            folder / "store",
            rounds=1,
            through=lambda inner: Tamper(inner, PLAIN, changed),
        )
        if not any(touched):  # whole numbers alone cannot be NaN
            return
        rejected = outcome.manifest["rejected"]
        require(len(rejected) == 1, f"one update was bad ({reason}), but {len(rejected)} were rejected: {rejected}.")
        (rejection,) = rejected
        expected = (rejection["round"], rejection["client"]) == (1, PLAIN) and reason in rejection["reason"]
        require(expected, f"an update of client {PLAIN} was bad ({reason}), but rejected was: {rejection}.")
        require(outcome.records[0].rejected == 1, "the record of the round does not count the rejected update.")
        (exchange,) = [one for one in algorithm.round if one.name == rejection["exchange"]]
        accepted = outcome.manifest["messages_of_client"]
        for client in PARTICIPANTS:
            is_accepted = exchange.name in accepted.get(str(client), {})
            require(is_accepted == (client != PLAIN), f"the update of client {client} is wrongly accepted or rejected.")
        for client, delivered in outcome.delivered.items():
            finite = all(leaf.isfinite().all() for leaf in trees.leaves(delivered) if leaf.is_floating_point())
            require(finite, f"a bad update reached what client {client} is delivered: it is not finite.")
        scored = {score.client for score in outcome.scores}
        require(scored == set(range(UNSEEN + 1)), f"only clients {sorted(scored)} were scored after a bad update.")

    return check
