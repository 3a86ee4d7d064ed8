"""Every update and report is checked at the server's door: names, shapes, dtypes, finiteness, norm."""

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.vocabulary import Tensors, Tree
from fedmoe.wire import by_expert


def fault_in_update(update: Tensors, expected: Tree, sent: Tree, max_norm: float | None) -> str | None:
    """Why this update is refused, or None. `sent` is the broadcast that it answers.

    An update that says `which` experts it holds may hold fewer than it was asked for: a client keeps back what it did
    not train.
    """
    like = by_expert(trees.to_named(expected))
    if "which" in like and "which" in update:
        update = by_expert(update)
        kept_back = set(like["which"].tolist()) - set(update["which"].tolist())
        like = {
            name: leaf for name, leaf in like.items() if not name.startswith(tuple(f"experts/{k}/" for k in kept_back))
        }
        like["which"] = update["which"]
    if strangers := sorted(set(update) - set(like)):
        return f"it holds {strangers[0]!r}, which is not declared"
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
        change(n, t) for n, t in sorted(update.items()) if n in sent and t.shape == sent[n].shape and n != "which"
    ]
    return float(torch.cat(changes).norm()) if changes else 0.0
