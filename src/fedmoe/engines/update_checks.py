"""What the server checks in every update and report: names, types, shapes, values, counts, and the norm of the change.

Each check ends in the reason of a rejection, or None.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Tensors, Tree
from fedmoe.errors import MessageError
from fedmoe.wire import expert_fields, read_expert_ids

# The contract's word for "how many examples": updates are weighted by it. A leaf of this name, at any level of an
# update or a report, is checked as a count.
COUNT = "num_examples"
REPORTED = (torch.float32, torch.float64, torch.int64)  # what the numbers of a report may be


class UpdateLimits(NamedTuple):
    """What one client may send at most, so that it can neither take a model over nor ruin it at a stroke.

    The defaults are far beyond what training comes to, and far below what sums and squares of float32 overflow at.
    Counts need not be whole (a client may add noise to them), but lie between 0 and `max_examples`.
    """

    max_norm: float | None = None  # of the change of all that was sent and came back: schedule.max_update_norm
    max_examples: float = 1e7  # the largest count: schedule.max_examples
    max_value: float = 1e6  # the largest absolute value of any other float, in updates and in reports


NO_NORM_LIMIT = UpdateLimits()


def update_rejections(
    update_S: Tensors, expected_S: Sequence[Tree], sent_S: Sequence[Tree], limits: UpdateLimits = NO_NORM_LIMIT
) -> list[str | None]:
    """For each client of a group that replied together: why its update is rejected, or None.

    A group is checked as a whole, one stacked tensor after another, and client by client only where that fails.
    """
    size = len(sent_S)
    if limits.max_norm is None and _right_together(update_S, expected_S, limits):
        return [None] * size
    if ragged := [name for name, tensor in update_S.items() if tensor.shape[:1] != (size,)]:
        return [f"{min(ragged)} is not of {size} clients, as the message says"] * size
    rows = trees.unstack(update_S, size) if update_S else [{}] * size
    return [update_rejection(*one, limits) for one in zip(rows, expected_S, sent_S, strict=True)]


def report_rejections(
    report_S: Tensors,
    declared: tuple[str, ...],
    earlier: Sequence[str | None],
    limits: UpdateLimits = NO_NORM_LIMIT,
) -> list[str | None]:
    """`earlier`, and for whoever is not rejected yet, why its report is."""
    size = len(earlier)
    if report_S.keys() == set(declared) and all(
        tensor.shape == (size,) and tensor.dtype == torch.float32 and _value_rejection(name, tensor, limits) is None
        for name, tensor in report_S.items()
    ):
        return list(earlier)
    if any(tensor.shape[:1] != (size,) for tensor in report_S.values()):
        return [f"its report is not of {size} clients, as the message says"] * size
    rows = trees.unstack(report_S, size) if report_S else [{}] * size
    return [reason or report_rejection(row, declared, limits) for reason, row in zip(earlier, rows, strict=True)]


def _right_together(update_S: Tensors, expected_S: Sequence[Tree], limits: UpdateLimits) -> bool:
    first = expected_S[0]
    if expert_fields(type(first)):  # a client may send fewer than it received: a matter of each client
        return False
    like = trees.to_named(first)
    return (
        update_S.keys() == like.keys()
        and all(_same_form(like, trees.to_named(other)) for other in expected_S if other is not first)
        and all(
            tensor.shape == (len(expected_S), *like[name].shape)
            and tensor.dtype == like[name].dtype
            and _value_rejection(name, tensor, limits) is None
            for name, tensor in update_S.items()
        )
    )


def _same_form(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype for name in one
    )


def update_rejection(update: Tensors, expected: Tree, sent: Tree, limits: UpdateLimits = NO_NORM_LIMIT) -> str | None:
    """Why this update is rejected, or None. `expected` is what it should look like, `sent` the broadcast it replies to.

    An update whose type declares experts may hold fewer than it was asked for: a client keeps back what it did not
    train.
    """
    kind, like, before = type(expected), trees.to_named(expected), trees.to_named(sent)
    if unknown := update.keys() - like.keys():
        return f"it holds {min(unknown)!r}, which is not declared"
    if missing := like.keys() - update.keys():
        return f"it lacks {min(missing)!r}"
    if fields := expert_fields(kind):
        try:
            asked, got = read_expert_ids(fields, like), read_expert_ids(fields, update)
        except MessageError as error:
            return str(error)
        if others := set(got) - set(asked):
            return f"it holds expert {min(others)}, which it was not sent"
        like, before = _rows_of(kind, like, got), _rows_of(type(sent), before, got)
    for name, tensor in sorted(update.items()):
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like[name].dtype} {tuple(like[name].shape)}"
        if reason := _value_rejection(name, tensor, limits):
            return reason
    if limits.max_norm is not None and not (norm := _norm_of_change(update, before)) <= limits.max_norm:
        return f"its change has norm {norm:.4g}, above schedule.max_update_norm={limits.max_norm:g}"
    return None


def report_rejection(report: Tensors, declared: tuple[str, ...], limits: UpdateLimits = NO_NORM_LIMIT) -> str | None:
    """Reports are a few declared, finite numbers."""
    if missing := sorted(set(declared) - {name.split("/")[0] for name in report}):
        return f"its report lacks {missing[0]!r}"
    for name, tensor in sorted(report.items()):
        if name.split("/")[0] not in declared:
            return f"its report holds {name!r}, which is not declared"
        if tensor.dim() or tensor.dtype not in REPORTED:
            known = ", ".join(map(str, REPORTED))
            return f"its report of {name} is {tensor.dtype} {tuple(tensor.shape)}, not a single number ({known})"
        if reason := _value_rejection(name, tensor.to(torch.float64), limits):
            return f"in its report, {reason}"
    return None


def _value_rejection(name: str, tensor: Tensor, limits: UpdateLimits) -> str | None:
    """Of a tensor of one client, or of a group."""
    if not tensor.numel() or not (tensor.is_floating_point() or _is_count(name)):
        return None
    low, high = (float(value) for value in tensor.aminmax())  # NaN where there is one
    if _is_count(name):
        right = low >= 0 and high <= limits.max_examples
        return None if right else f"{name} is {high if low >= 0 else low:g}, not from 0 to {limits.max_examples:g}"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{name} holds NaN or infinity (a diverged loss: lower the learning rate)"
    largest = max(low, high, key=abs)
    return f"{name} holds {largest:.4g}, beyond ±{limits.max_value:g}" if abs(largest) > limits.max_value else None


def _is_count(name: str) -> bool:
    return name.rpartition("/")[2] == COUNT


def _rows_of(kind: type[Tree], named: Tensors, experts: list[int]) -> Tensors:
    """A message as it would be with these experts only, in this order."""
    fields = expert_fields(kind)
    if fields is None or (held := read_expert_ids(fields, named)) == experts:
        return named
    rows = [held.index(expert) for expert in experts]
    return {
        name: leaf[rows] if name == fields.expert_ids or name.startswith(f"{fields.experts}/") else leaf
        for name, leaf in named.items()
    }


def _norm_of_change(update: Tensors, sent: Tensors) -> float:
    """Over the floats that were sent and came back changed; other numbers, such as counts, have their own limits."""
    changes = [
        (tensor.double() - sent[name]).flatten()
        for name, tensor in sorted(update.items())
        if tensor.is_floating_point() and name in sent and tensor.shape == sent[name].shape
    ]
    return float(torch.cat(changes).norm()) if changes else 0.0
