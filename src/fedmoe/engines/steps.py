"""The steps of a run: rounds, then the exchanges of `after_rounds`, then the release; and their records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.manifest import Sent
from fedmoe.engines.protocol import Phase, exchanges_of

STEPS: tuple[Phase, ...] = ("round", "after_rounds", "release")  # phases that change the server's state


class RoundRecord(NamedTuple):
    """What is on record of a step. An abandoned one left everything as it was, private states included."""

    round: int
    phase: Phase
    clients: list[ClientId]
    rejected: int
    reports: dict[str, float]  # mean over the clients that reported
    seconds: float
    sent: Sent  # bytes by exchange and client, of what was accepted
    experts: dict[str, Any]  # what the server saw of them: `aggregation.expert_observation.Observation`
    abandoned: str | None = None  # why
    warnings: Sequence[str] = ()


@dataclass
class Attempt:
    """A step under way: it counts as a whole or not at all."""

    server: Tree
    versions: dict[ClientId, int] = field(default_factory=dict)  # of the private states that clients came to
    reports: dict[str, float] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    abandoned: str | None = None


class Steps:
    """Which step is what; steps count from 1."""

    def __init__(self, algorithm: Algorithm, rounds: int, *, release: bool) -> None:
        self.algorithm = algorithm
        self.num_rounds = rounds if algorithm.round else 0
        self.last_exchange = self.num_rounds + len(algorithm.after_rounds)
        self.releases = release and algorithm.release is not None
        self.total = self.last_exchange + self.releases

    def phase(self, step: int) -> Phase:
        if step <= self.num_rounds:
            return "round"
        return "after_rounds" if step <= self.last_exchange else "release"

    def exchanges(self, phase: Phase, step: int) -> list[tuple[int, Exchange]]:
        """The exchanges of a step, each with its place in its phase: of `after_rounds` a step is one."""
        numbered = list(enumerate(exchanges_of(self.algorithm, phase)))
        return numbered[step - self.num_rounds - 1 :][:1] if phase == "after_rounds" else numbered
