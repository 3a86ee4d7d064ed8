"""Who may be drawn in which round: pools that change by schedule, and anchors that are drawn apart from the others.

Both belong to the schedule and not to an algorithm, so that all methods can be sampled alike. Client c is in group
c mod `groups`, as in a split by labels with `label_groups`.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe.errors import ConfigError
from fedmoe.partition.split import Indices
from fedmoe.setting_types import PositiveInt


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PoolSchedule:
    """The clients that may be drawn: one group more, or another group instead, every so many rounds."""

    kind: Literal["grow", "switch"]
    groups: PositiveInt
    every: PositiveInt  # rounds; after the last group "grow" stays as it is and "switch" starts over

    def is_open(self, clients: Indices, round_number: int) -> NDArray[np.bool_]:
        """(N,) bool: which of these clients are in the pool of this round; rounds are counted from 1."""
        stage = (round_number - 1) // self.every
        group = clients % self.groups
        open_now: NDArray[np.bool_] = group <= stage if self.kind == "grow" else group == stage % self.groups
        return open_now


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnchorSchedule:
    """Clients 0 … number - 1 are anchors (Dun et al. 2023); `per_round` of those in the pool are drawn, if it has them.

    The rest of `schedule.clients_per_round` is drawn from the other clients.
    """

    number: PositiveInt
    per_round: PositiveInt

    @property
    def clients(self) -> range:
        return range(self.number)


class Drawing(NamedTuple):
    """The participants of a federation, and how the schedule lets them be drawn."""

    participants: Indices
    pool: PoolSchedule | None = None
    anchors: AnchorSchedule | None = None

    def in_pool(self, round_number: int) -> Indices:
        if self.pool is None:
            return self.participants
        pool: Indices = self.participants[self.pool.is_open(self.participants, round_number)]
        return pool

    def others(self, round_number: int) -> Indices:
        """The clients that an algorithm draws from: all but the anchors."""
        pool = self.in_pool(round_number)
        return pool if self.anchors is None else pool[pool >= self.anchors.number]

    def draw_anchors(self, round_number: int, rng: np.random.Generator) -> Indices:
        pool = self.in_pool(round_number)
        if self.anchors is None:
            return pool[:0]
        present = pool[pool < self.anchors.number]
        return rng.choice(present, min(self.anchors.per_round, len(present)), replace=False)

    def check(self, clients_per_round: int | None, num_clients: int) -> None:
        """Refuse a schedule that these clients cannot follow, before the first round."""
        if self.anchors is not None:
            self._check_anchors(self.anchors, clients_per_round, num_clients)
        if self.pool is not None:
            for group in range(1 if self.pool.kind == "grow" else self.pool.groups):
                found = len(self.others(group * self.pool.every + 1))
                needed = 1 if clients_per_round is None else clients_per_round - self.anchors_per_round
                if found < needed:
                    raise ConfigError(
                        f"schedule.pool.groups={self.pool.groups}: group {group} has {found} clients that opted in and "
                        f"are no anchors, but {needed} are drawn in a round. Make fewer groups, or lower "
                        "schedule.clients_per_round."
                    )

    @property
    def anchors_per_round(self) -> int:
        return self.anchors.per_round if self.anchors else 0

    def _check_anchors(self, anchors: AnchorSchedule, clients_per_round: int | None, num_clients: int) -> None:
        if anchors.number > num_clients or anchors.per_round > anchors.number:
            raise ConfigError(
                f"schedule.anchors: {anchors.per_round} per round of {anchors.number} anchors among {num_clients} "
                "clients cannot be drawn. Lower per_round or number."
            )
        if clients_per_round is None or anchors.per_round >= clients_per_round:
            shown = "'all'" if clients_per_round is None else clients_per_round
            raise ConfigError(
                f"schedule.clients_per_round={shown} with schedule.anchors.per_round={anchors.per_round} leaves no "
                "number of other clients to draw. Set it to anchors and others together."
            )
        for client in anchors.clients:
            if client not in self.participants:
                raise ConfigError(
                    f"client {client} is an anchor (schedule.anchors.number={anchors.number}), but it has opted out or "
                    "has no opted-in training record, so it would train nobody's expert. Let it opt in, or number the "
                    "clients so that anchors come first."
                )
