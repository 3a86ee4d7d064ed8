"""The attacks of an audit: what each reads of a client's label distribution p(y|s) from one reply."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.algorithms.label_priors.calibration import Slope
from fedmoe.core_types import Tensors, Tree
from fedmoe.evaluation.label_leakage import (
    normalised_shares,
    shares_from_bias,
    shares_from_rows,
    shares_from_usage,
    step_length,
)
from fedmoe.training.settings import LocalTraining


class Observed(NamedTuple):
    """What the server holds after one exchange with one client."""

    sent: Tree
    update: Tree


Attack = Callable[[Observed], Tensor | None]  # p(y|s) as read from a reply, or None where there is nothing to read


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

    def by_row(reply: Observed) -> Tensor | None:
        change_CF = output_change(output_bias, reply)
        return None if change_CF is None else shares_from_rows(change_CF)

    attacks: dict[str, Attack] = {
        "output bias, eq. 15": scaled,
        "output bias, normalised": normalised,
        "output weights, length of rows": by_row,
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


def output_change(bias: str | None, reply: Observed) -> Tensor | None:
    """How the client moved the output layer's weights (C, F), which lie beside its bias, of a single model."""
    name = "" if bias is None else f"{bias.removesuffix('bias')}weight"
    before: Tensors = getattr(reply.sent, "model", {})
    after: Tensors = getattr(reply.update, "model", {})
    return after[name] - before[name] if name in before and name in after else None


def attacks_on_calibration() -> dict[str, Attack]:
    """On one slope that a client sends when models are calibrated; the mean of all of them is read alike."""

    def scaled(reply: Observed) -> Tensor | None:
        return shares_from_bias(-reply.update.biases, 1.0) if isinstance(reply.update, Slope) else None

    def normalised(reply: Observed) -> Tensor | None:
        return normalised_shares(-reply.update.biases) if isinstance(reply.update, Slope) else None

    return {"calibration, eq. 15": scaled, "calibration, normalised": normalised}


def mean_slope(replies: Sequence[Observed]) -> Observed:
    """All that a client sent in the calibration as one: what it is worth to have it asked so often."""
    slopes = [reply for reply in replies if isinstance(reply.update, Slope)]
    biases = torch.stack([reply.update.biases for reply in slopes]).mean(0)
    return slopes[0]._replace(update=slopes[0].update._replace(biases=biases))
