"""Labels that are words: which classes there are, and the number of each row's."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedmoe.clients.own_records import ExampleArrays, OptedOut, read_mask
from fedmoe.data.cells import in_order, text
from fedmoe.data.tables import unknown_words
from fedmoe.errors import DataError

Parts = dict[str, ExampleArrays]  # of one client, by "train", "validation" and "test"


def number_labels(
    clients: Mapping[str, Parts],
    declared: Sequence[str] | None,
    unseen: Collection[str],
    opted_out: Mapping[str, OptedOut],
) -> tuple[dict[str, Parts], tuple[str, ...]]:
    """The clients with labels as numbers, and the names of classes: those declared, or those that shared rows show.

    Where labels are numbers already, they are left as they are.
    """
    if not any(holds_words(arrays[1]) for parts in clients.values() for arrays in parts.values()):
        return dict(clients), tuple(declared or ())
    if declared is None:
        shared = {name: parts for name, parts in clients.items() if name not in unseen}
        found = {word for name, parts in shared.items() for word in _shared_words(name, parts, opted_out)}
        declared = in_order(found)
    numbered = {
        name: {part: with_numbers(arrays, declared, _whose(name, part)) for part, arrays in parts.items()}
        for name, parts in clients.items()
    }
    return numbered, tuple(declared)


def with_numbers(arrays: ExampleArrays, class_names: Sequence[str], whose: str) -> ExampleArrays:
    """The same with the numbers of classes where labels are words."""
    if not holds_words(arrays[1]):
        return arrays
    known = {name: number for number, name in enumerate(class_names)}
    words = _words(arrays[1])
    for row, word in enumerate(words):
        if word is None:
            raise DataError(f"{whose}, row {row}: the label is missing. Fill it in, or drop the row.")
        if word not in known:
            why = unknown_words(class_names, word, "class_names=…")
            raise DataError(f"{whose}, row {row}: the label {word!r} is not known. {why}")
    return (arrays[0], torch.tensor([known[str(word)] for word in words]), *arrays[2:])


def holds_words(labels: Any) -> bool:
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "OUS":
        return False
    return isinstance(labels, np.ndarray | Sequence) and any(isinstance(label, str | bytes) for label in labels)


def _shared_words(name: str, parts: Parts, opted_out: Mapping[str, OptedOut]) -> set[str]:
    """Of opted-in training and validation rows."""
    words = _words(parts["train"][1]) if holds_words(parts["train"][1]) else []
    out_N = read_mask(f"client {name!r}", opted_out.get(name, False), len(parts["train"][1]))
    found = {word for word, out in zip(words, out_N.tolist(), strict=bool(words)) if not out}
    if "validation" in parts and holds_words(parts["validation"][1]) and not bool(out_N.all()):
        found |= set(_words(parts["validation"][1]))
    return {word for word in found if word is not None}


def _words(labels: Any) -> list[str | None]:
    return [text(label.decode() if isinstance(label, bytes) else label) for label in labels]


def _whose(name: str, part: str) -> str:
    return f"client {name!r}" if part == "train" else f"client {name!r}, {part}"
