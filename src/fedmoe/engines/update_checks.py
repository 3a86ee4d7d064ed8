"""Every update and report is checked at the server's door: names, shapes, dtypes, finiteness, norm."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Tensors, Tree
from fedmoe.wire import by_expert


def faults_in_updates(
    update_S: Tensors, expected: Tree, sent: Sequence[Tree], max_norm: float | None
) -> list[str | None]:
    """For each client of a group that answered together. A group that is right at one look needs none at each."""
    if max_norm is None and _right_together(update_S, trees.to_named(expected), len(sent)):
        return [None] * len(sent)
    if ragged := [name for name, tensor in update_S.items() if tensor.shape[:1] != (len(sent),)]:
        return [f"{sorted(ragged)[0]} is not of {len(sent)} clients, as the message says"] * len(sent)
    rows = trees.unstack(update_S, len(sent)) if update_S else [{}] * len(sent)
    return [fault_in_update(row, expected, one, max_norm) for row, one in zip(rows, sent, strict=True)]


def faults_in_reports(report_S: Tensors, declared: tuple[str, ...], faults: Sequence[str | None]) -> list[str | None]:
    """`faults`, and those in reports for whoever had none."""
    like = dict.fromkeys(declared, torch.zeros(()))
    if _right_together({name: tensor.to(torch.float32) for name, tensor in report_S.items()}, like, len(faults)):
        return list(faults)
    if any(tensor.shape[:1] != (len(faults),) for tensor in report_S.values()):
        return [f"its report is not of {len(faults)} clients, as the message says"] * len(faults)
    rows = trees.unstack(report_S, len(faults)) if report_S else [{}] * len(faults)
    return [fault or fault_in_report(row, declared) for fault, row in zip(faults, rows, strict=True)]


def _right_together(message_S: Tensors, like: Tensors, size: int) -> bool:
    if "expert_ids" in like:  # some experts of several: a matter of each client
        return False
    return message_S.keys() == like.keys() and all(
        tensor.shape == (size, *like[name].shape) and tensor.dtype == like[name].dtype and _surely_finite(tensor)
        for name, tensor in message_S.items()
    )


def _surely_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and is ten times cheaper than a look at each; an overflow gets that look."""
    return not tensor.is_floating_point() or math.isfinite(tensor.sum())


def fault_in_update(update: Tensors, expected: Tree, sent: Tree, max_norm: float | None) -> str | None:
    """Why this update is refused, or None. `sent` is the broadcast that it answers.

    An update that says `which` experts it holds may hold fewer than it was asked for: a client keeps back what it did
    not train.
    """
    like = by_expert(trees.to_named(expected))
    if "expert_ids" in like and "expert_ids" in update:
        update = by_expert(update)
        kept_back = set(like["expert_ids"].tolist()) - set(update["expert_ids"].tolist())
        like = {
            name: leaf for name, leaf in like.items() if not name.startswith(tuple(f"experts/{k}/" for k in kept_back))
        }
        like["expert_ids"] = update["expert_ids"]
    if unknown := sorted(set(update) - set(like)):
        return f"it holds {unknown[0]!r}, which is not declared"
    if missing := sorted(set(like) - set(update)):
        return f"it lacks {missing[0]!r}"
    for name, tensor in sorted(update.items()):
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like[name].dtype} {tuple(like[name].shape)}"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} holds NaN or infinity (a diverged loss: lower the learning rate)"
    if max_norm is not None and (norm := _norm_of_change(update, by_expert(trees.to_named(sent)))) > max_norm:
        return f"its change has norm {norm:.4g}, above schedule.max_update_norm={max_norm:g}"
    return None


def fault_in_report(report: Tensors, declared: tuple[str, ...]) -> str | None:
    """Reports are a few declared, finite numbers."""
    if missing := sorted(set(declared) - {name.split("/")[0] for name in report}):
        return f"its report lacks {missing[0]!r}"
    for name, tensor in sorted(report.items()):
        if name.split("/")[0] not in declared:
            return f"its report holds {name!r}, which is not declared"
        if tensor.dim():
            return f"its report of {name} has shape {tuple(tensor.shape)}, but reports are single numbers"
        if not bool(tensor.isfinite().all()):
            return f"its report of {name} is not finite"
    return None


def _norm_of_change(update: Tensors, sent: Tensors) -> float:
    """Over the tensors that were sent and came back changed; other numbers, such as counts, have their own caps."""

    def change(name: str, tensor: Tensor) -> Tensor:
        return (tensor - sent[name]).double().flatten()

    changes = [
        change(n, t) for n, t in sorted(update.items()) if n in sent and t.shape == sent[n].shape and n != "expert_ids"
    ]
    return float(torch.cat(changes).norm()) if changes else 0.0
