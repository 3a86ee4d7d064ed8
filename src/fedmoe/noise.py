"""Noise that a server cannot subtract: a client's own secret, stretched into draws by the step of its privacy ledger.

Streams derive from the run's seed, which the server knows; whoever knows it would know the noise. A *secure* key is
drawn from the operating system and never leaves its client; a *seeded* one derives from the seed, for experiments that
are to be repeated. Either way the draws of a step are the same whenever they are asked for, so a retry sends the same
bytes, and different steps never share a draw.
"""

import hashlib
import secrets
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.core_types import ClientId

NoiseSource = Literal["secure", "seeded"]
KEY_BYTES = 32
SUMMED = 4  # Gaussians per draw of the secure source: see `NoiseKey.normal`


class NoiseKey(NamedTuple):
    source: NoiseSource
    key: bytes

    @classmethod
    def fresh(cls) -> "NoiseKey":
        return cls("secure", secrets.token_bytes(KEY_BYTES))

    @classmethod
    def of_seed(cls, seed: int, client: ClientId) -> "NoiseKey":
        return cls("seeded", hashlib.blake2b(f"{seed}/privacy/{client}".encode(), digest_size=KEY_BYTES).digest())

    def uniform(self, purpose: str, step: int, count: int) -> Tensor:
        """(count,) float64 in [0, 1)."""
        if self.source == "seeded":
            return torch.rand(count, generator=self._generator(purpose, step), dtype=torch.float64)
        return torch.from_numpy(self._secure_uniform(purpose, step, count))

    def normal(self, purpose: str, step: int, count: int) -> Tensor:
        """(count,), standard normal: float64 of the secure source, float32 of the seeded one, which is to be fast.

        A single Gaussian in floating point has holes that give away what it was added to (Mironov 2012); the sum of
        four, which is Gaussian too, hides them (Holohan and Braghin 2021). Only the secure source pays for that.
        """
        if self.source == "seeded":
            return torch.randn(count, generator=self._generator(purpose, step))
        first, second = self._secure_uniform(purpose, step, SUMMED * count).reshape(2, -1)
        radius = np.sqrt(-2.0 * np.log1p(-first))  # Box and Muller: 1 - first is never 0
        both = np.concatenate([radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)])
        return torch.from_numpy(both.reshape(SUMMED, count).sum(0) / np.sqrt(SUMMED))

    def _generator(self, purpose: str, step: int) -> torch.Generator:
        place = hashlib.blake2b(f"{purpose}/{step}".encode(), key=self.key, digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(place, "big") >> 1)

    def _secure_uniform(self, purpose: str, step: int, count: int) -> NDArray[np.float64]:
        """SHAKE-256 of key and place is a keyed pseudorandom stream; 53 bits make a float64."""
        stream = hashlib.shake_256(self.key + f"/{purpose}/{step}".encode()).digest(8 * count)
        bits: NDArray[np.uint64] = np.frombuffer(stream, dtype=np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53
