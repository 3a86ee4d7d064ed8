"""Random streams derived from (run seed, purpose, round, client), never from a global generator.

So results do not depend on the order of clients, the number of workers, or a stop in between.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch

from fedmoe.core_types import ClientId
from fedmoe.private_steps import PrivateSteps


def derive_seed(*path: int | str) -> int:
    """A 63-bit seed for a path such as (run seed, "sample", round).

    >>> derive_seed(0, "split") == derive_seed(0, "split") != derive_seed(0, "noise")
    True
    """
    return _seed(hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8))


def _seed(hashed: "hashlib.blake2b") -> int:
    return int.from_bytes(hashed.digest(), "big") >> 1


def torch_stream(*path: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*path))


def numpy_stream(*path: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(*path))


class Streams(NamedTuple):
    """The random streams of one cohort: each client draws from its own, whoever else is in the cohort."""

    seed: int
    scope: str  # the exchange, or "personalize": streams of different work never meet
    round: int
    clients: tuple[ClientId, ...]
    in_rounds: bool = True  # False for what follows the rounds, such as personalisation; no stream depends on it
    # Where what is computed will be sent, and privacy is on: then whatever trains with these streams is DP-SGD.
    private_steps: PrivateSteps | None = None

    def generators(self, purpose: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in self.seeds(purpose)]

    def seeds(self, purpose: str) -> list[int]:
        """`derive_seed` of (seed, scope, purpose, round, client) for each client; what they share is hashed once."""
        common = hashlib.blake2b(f"{self.seed}/{self.scope}/{purpose}/{self.round}/".encode(), digest_size=8)
        seeds = []
        for client in self.clients:
            own = common.copy()
            own.update(str(client).encode())
            seeds.append(_seed(own))
        return seeds
