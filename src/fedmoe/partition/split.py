"""Which example went to which client: compact arrays, a hash, and a file.

A million clients are three arrays, never a million objects.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedmoe.errors import DataError
from fedmoe.storage.files import write_atomically

Indices = NDArray[np.int64]
NO_ROWS: Indices = np.zeros(0, dtype=np.int64)


class Shards(NamedTuple):
    """Client c holds rows[offsets[c]:offsets[c + 1]]."""

    offsets: Indices
    rows: Indices

    def of(self, client: int) -> Indices:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Indices:
        return np.diff(self.offsets)

    @classmethod
    def from_lists(cls, lists: "list[Indices]") -> "Shards":
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(rows) for rows in lists], out=offsets[1:])
        return cls(offsets, np.concatenate([*lists, np.zeros(0, dtype=np.int64)]).astype(np.int64))


@dataclass(frozen=True)
class Split:
    """Rows of the training part for `train` and `validation`, of the test part for `global_test`.

    `test` are rows of the part that `own_test` names: a natural client's own test data are among its own rows.
    `domains` numbers what else sets clients apart, such as the angle by which a client's images are turned.
    `public`, `public_validation` and `global_validation` are rows of the training part that no client holds; the first
    `num_validation` of the unseen clients are for choosing settings.
    Clients 0 … num_clients - 1 train; the num_unseen clients after them never do.
    """

    num_clients: int
    num_unseen: int
    train: Shards
    validation: Shards
    test: Shards
    global_test: Indices
    own_test: Literal["train", "test"] = "test"
    domains: Indices | None = None
    public: Indices = field(default_factory=lambda: NO_ROWS)
    public_validation: Indices = field(default_factory=lambda: NO_ROWS)
    global_validation: Indices = field(default_factory=lambda: NO_ROWS)
    num_validation: int = 0

    def __repr__(self) -> str:
        rows = (
            f"{len(self.train.rows)} training, {len(self.validation.rows)} validation, {len(self.test.rows)} test rows"
        )
        return f"<Split: {self.num_clients} clients and {self.num_unseen} unseen; {rows}>"

    @property
    def digest(self) -> str:
        """A hash of every assignment: two runs on one split have the same one."""
        validating = f",{self.num_validation}" if self.num_validation else ""
        counts = f"{self.num_clients},{self.num_unseen},{self.own_test}{validating}"
        state = hashlib.blake2b(counts.encode(), digest_size=16)
        for name, array in self.arrays().items():
            state.update(f"{name}:{array.size};".encode() + np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    @property
    def public_digest(self) -> str:
        """Of the public rows to train on: which rows a model trained on them has seen."""
        return hashlib.blake2b(np.sort(self.public).tobytes(), digest_size=16).hexdigest() if len(self.public) else ""

    def arrays(self) -> dict[str, Indices]:
        shards = {"train": self.train, "validation": self.validation, "test": self.test}
        named = {f"{name}_{part}": array for name, s in shards.items() for part, array in s._asdict().items()}
        domains = {} if self.domains is None else {"domains": self.domains}
        public = {"public": self.public, "public_validation": self.public_validation} if len(self.public) else {}
        validation = {"global_validation": self.global_validation} if len(self.global_validation) else {}
        return {**named, "global_test": self.global_test, **domains, **public, **validation}

    def class_counts(self, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
        """Training examples per (client, class): what a picture of the split shows."""
        owners = np.repeat(np.arange(len(self.train.sizes)), self.train.sizes)
        cells = owners * num_classes + labels[self.train.rows]
        return np.bincount(cells, minlength=len(self.train.sizes) * num_classes).reshape(-1, num_classes)

    def save(self, path: Path) -> None:
        counts = {"num_clients": self.num_clients, "num_unseen": self.num_unseen, "num_validation": self.num_validation}
        meta = {**counts, "own_test": self.own_test, "digest": self.digest}
        write_atomically(path, save(self.arrays(), {"split": json.dumps(meta)}))

    @classmethod
    def load(cls, path: Path) -> "Split":
        try:
            with safe_open(path, "numpy") as file:
                meta = json.loads(file.metadata()["split"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            parts = {n: Shards(arrays[f"{n}_offsets"], arrays[f"{n}_rows"]) for n in ("train", "validation", "test")}
            split = cls(
                num_clients=meta["num_clients"],
                num_unseen=meta["num_unseen"],
                own_test=meta["own_test"],
                global_test=arrays["global_test"],
                domains=arrays.get("domains"),
                num_validation=meta.get("num_validation", 0),
                public=arrays.get("public", NO_ROWS),
                public_validation=arrays.get("public_validation", NO_ROWS),
                global_validation=arrays.get("global_validation", NO_ROWS),
                **parts,
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a split file ({error}). Delete it and run again.") from error
        if split.digest != meta["digest"]:
            raise DataError(f"{path} was changed: its hash is {split.digest}, it states {meta['digest']}.")
        return split
