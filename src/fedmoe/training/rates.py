"""Learning rates that change: over the rounds of a run, over the local steps of a client, or both at once."""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.errors import ConfigError
from fedmoe.setting_types import Fraction, NonNegativeInt, PositiveInt


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RateSchedule:
    """The share of the learning rate at each round or step: as `LinearLR` for the warm-up, then `StepLR` or
    `CosineAnnealingLR` of `torch.optim.lr_scheduler`. `factor` counts for step, `final` for cosine."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    warm_up: NonNegativeInt = 0  # the first so many rise evenly: 1/warm_up, 2/warm_up, … 1
    every: PositiveInt | None = None  # step: so many between two cuts
    factor: Fraction = 0.1  # step: what a cut leaves
    over: PositiveInt | None = None  # cosine: how many until `final`; default: all that follow the warm-up
    final: Fraction = 0.0  # cosine: the share in the end

    def __post_init__(self) -> None:
        if self.kind == "step" and self.every is None:
            raise ConfigError(
                "a learning rate of kind 'step' needs to know how often it is cut: every = 10, for example, beside "
                "kind = 'step'."
            )
        for key, kind in (("every", "step"), ("over", "cosine")):
            if getattr(self, key) is not None and self.kind != kind:
                raise ConfigError(
                    f"a learning rate of kind {self.kind!r} has no {key!r}, which is for {kind!r}. Remove one of "
                    f"the two."
                )

    @property
    def depends_on_total(self) -> bool:
        return self.kind == "cosine" and self.over is None

    def share(self, index: int, total: int) -> float:
        """At `index`, counted from 0, out of `total`."""
        if index < self.warm_up:
            return (index + 1) / self.warm_up
        index -= self.warm_up
        if self.every is not None:
            return float(self.factor ** (index // self.every))
        if self.kind == "cosine":
            length = self.over or max(total - self.warm_up, 1)
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * min(index / length, 1.0))) / 2
        return 1.0


class Rates(NamedTuple):
    """The schedules of a group. `rounds`: how many the run has."""

    over_rounds: RateSchedule | None
    over_steps: RateSchedule | None
    rounds: int

    def shares(self, round_number: int | None, steps: int) -> Tensor:
        """Of the learning rate at each of a client's local steps, float64; `round_number` is None outside of rounds."""
        return _shares(self, round_number, steps)


@lru_cache(maxsize=256)  # the clients of a cohort mostly take as many steps as each other
def _shares(rates: Rates, round_number: int | None, steps: int) -> Tensor:
    of_round = 1.0
    if rates.over_rounds is not None and round_number is not None:
        of_round = rates.over_rounds.share(round_number - 1, rates.rounds)
    if rates.over_steps is None:
        return torch.full((steps,), of_round, dtype=torch.float64)
    of_steps = [rates.over_steps.share(step, steps) for step in range(steps)]
    return of_round * torch.tensor(of_steps, dtype=torch.float64)
