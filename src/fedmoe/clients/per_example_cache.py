"""What a frozen public network says of each example is computed once per client and kept, for as long as the run lasts.

It stays where the records are: in the memory of the worker, and where that gets too much in a temporary folder for its
owner's eyes only, which goes with the process. On a real node that is the node's own.
"""

import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedmoe.clients.federation import ClientDataset, Federation
from fedmoe.core_types import ClientId, Examples, Tensors

OnceOfExamples = Mapping[
    str, Callable[[Tensor], Tensor]
]  # name in `Examples.extra` -> function of x (N, ...) -> (N, …)

MOST_BYTES = 256 * 1024**2  # in memory, per process
CHUNK = 250  # examples that are computed at a time


class PerExampleCache:
    """By (client, part). The least recently used moves to disk when memory is full."""

    def __init__(self, functions: OnceOfExamples, most_bytes: int = MOST_BYTES) -> None:
        self.functions, self.most_bytes = dict(functions), most_bytes
        self._memory: OrderedDict[tuple[ClientId, str], Tensors] = OrderedDict()
        self._used = 0
        self._folder: Path | None = None

    def __call__(self, client: ClientId, part: str, rows: Examples) -> Examples:
        """The same rows with what the functions say of them, in `extra`."""
        key = (client, part)
        kept = self._memory.pop(key, None)
        if kept is None:
            kept = self._from_disk(key) or self._computed(rows.x)
            self._used += _size(kept)
        self._memory[key] = kept
        while self._used > self.most_bytes and self._memory:
            self._to_disk(*self._memory.popitem(last=False))
        return rows._replace(extra={**rows.extra, **kept})

    def _computed(self, x: Tensor) -> Tensors:
        with torch.no_grad():
            return {
                name: torch.cat([function(part) for part in x.split(CHUNK)]) if len(x) else function(x)
                for name, function in self.functions.items()
            }

    def _to_disk(self, key: tuple[ClientId, str], kept: Tensors) -> None:
        self._used -= _size(kept)
        path = self._place(key)
        if not path.exists():
            aside = path.with_suffix(f".{os.getpid()}")  # several workers may write the same
            save_file(kept, aside)
            aside.rename(path)

    def _from_disk(self, key: tuple[ClientId, str]) -> Tensors | None:
        if self._folder is None or not self._place(key).exists():
            return None
        return load_file(self._place(key))

    def _place(self, key: tuple[ClientId, str]) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedmoe-embeddings-"))  # mode 0700
            weakref.finalize(self, _remove, self._folder, os.getpid())
        client, part = key
        return self._folder / f"{client}-{part}"


def _remove(folder: Path, owner: int) -> None:
    """A forked worker leaves what its parent made."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _size(kept: Tensors) -> int:
    return sum(tensor.nbytes for tensor in kept.values())


class _CachedClient:
    """A client whose training, validation and unlabelled rows carry what was computed of them."""

    def __init__(self, client: ClientId, records: ClientDataset, cache: PerExampleCache) -> None:
        self.client, self.records, self.cache = client, records, cache
        self.train_opted_in, self.validation_opted_in = records.train_opted_in, records.validation_opted_in

    @cached_property
    def train(self) -> Examples:
        return self.cache(self.client, "train", self.records.train)

    @cached_property
    def validation(self) -> Examples:
        return self.cache(self.client, "validation", self.records.validation)

    @cached_property
    def unlabelled(self) -> Examples | None:
        rows = self.records.unlabelled
        return None if rows is None else self.cache(self.client, "unlabelled", rows)

    @property
    def test(self) -> Examples:
        return self.records.test


def with_cached(federation: Federation, functions: OnceOfExamples) -> Federation:
    if not functions:
        return federation
    cache = PerExampleCache(functions)
    return replace(federation, load=lambda client: _CachedClient(client, federation.load(client), cache))
