"""What one exchange may spend of its clients' privacy: the mechanism, the noise, and the steps that were taken.

It travels with the random streams of a `local_update`, so whatever is trained there is trained by DP-SGD, by any
algorithm and without its doing; work that never leaves the client has streams without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import ClientId
from fedmoe.noise import NoiseKey

Clipping = Literal["whole", "per_tensor"]
ChargeKind = Literal["gradient", "label_counts"]


class Mechanism(NamedTuple):
    """DP-SGD (Abadi et al. 2016): every number is public. `noise_multiplier` is relative to the sensitivity."""

    noise_multiplier: float  # sigma; 0: no noise, and no guarantee
    sampling_rate: float  # of Poisson sampling: each record by itself
    expected_batch_size: float  # what a sum of clipped gradients is divided by, however many there are
    clip_norm: float = 1.0  # C
    clipping: Clipping = "whole"
    microbatch_size: int = 64  # examples whose gradients are held at a time

    @property
    def steps_per_epoch(self) -> int:
        """As many as see every record once in the mean."""
        return math.ceil(1 / self.sampling_rate - 1e-9)

    def sensitivity(self, num_tensors: int) -> float:
        """By how much one record may change the sum of clipped gradients."""
        return self.clip_norm * (math.sqrt(num_tensors) if self.clipping == "per_tensor" else 1.0)


class Charge(NamedTuple):
    """So many steps of one kind; `sampling_rate` is 1 where every record takes part."""

    kind: ChargeKind
    steps: int
    sampling_rate: float
    noise_multiplier: float
    sensitivity: float


@dataclass
class PrivateSteps:
    mechanism: Mechanism
    keys: Mapping[ClientId, NoiseKey]
    first_steps: Mapping[ClientId, int]  # of the ledger: what was charged before
    taken: dict[ClientId, list[Charge]] = field(default_factory=dict)

    def begin_step(self, client: ClientId, sensitivity: float) -> int:
        """Charge one step of DP-SGD; its number keys the noise."""
        m = self.mechanism
        return self._charge(client, Charge("gradient", 1, m.sampling_rate, m.noise_multiplier, sensitivity))

    def sampled_rows(self, client: ClientId, step: int, count: int) -> Tensor:
        """Poisson sampling: the rows of this step's batch, which may be none. Secret, as the accountant assumes."""
        return (self.keys[client].uniform("sample", step, count) < self.mechanism.sampling_rate).nonzero()[:, 0]

    def noise(self, client: ClientId, step: int, count: int, sensitivity: float) -> Tensor:
        """(count,) float32, Gaussian with deviation sigma times the sensitivity."""
        deviation = self.mechanism.noise_multiplier * sensitivity
        if not deviation:
            return torch.zeros(count)
        return (deviation * self.keys[client].normal("noise", step, count)).to(torch.float32)

    def noised_counts(self, client: ClientId, counts_C: Tensor) -> Tensor:
        """Counts of labels, noised once: one record changes one of them by 1.

        The draw has no step, so it is the same in every round, and the ledger counts it once.
        """
        sigma = self.mechanism.noise_multiplier
        self._charge(client, Charge("label_counts", 1, 1.0, sigma, 1.0))
        noise_C = sigma * self.keys[client].normal("label counts", 0, counts_C.numel())
        return (counts_C.double() + noise_C.view_as(counts_C)).clamp_min(0).to(counts_C.dtype)

    def _charge(self, client: ClientId, charge: Charge) -> int:
        charges = self.taken.setdefault(client, [])
        if charge.kind == "label_counts":
            if charge not in charges:
                charges.append(charge)
            return 0
        step = self.first_steps.get(client, 0) + sum(one.steps for one in charges if one.kind == "gradient")
        if charges and charges[-1]._replace(steps=1) == charge:
            charges[-1] = charge._replace(steps=charges[-1].steps + 1)
        else:
            charges.append(charge)
        return step
