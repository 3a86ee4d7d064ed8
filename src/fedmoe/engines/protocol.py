"""What a session and the workers that serve its clients agree on; and what an engine has to offer."""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.evaluation.personal_model import PersonalModel

Phase = Literal["round", "after_rounds", "validation", "release", "delivery"]


class Transport(Protocol):
    """An engine: it brings frames to workers and replies back, and nothing else."""

    # Whether workers are part of this program: an error that such a one reports ends the run with its own words. What
    # other nodes report is a reason to reject their reply.
    trusted: bool
    # Whether all workers read and write one store of private states, so that any of them can be asked about it. On real
    # nodes each has its own client's: a frame then goes to the node of the client that its header names.
    one_store: bool

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        """(index of the frame, reply), as replies arrive. A reply that is lost or late is left out."""

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> PersonalModel:
        """What this client ended with, where the engine can reach it; `state` and `final` are state versions."""


def exchanges_of(algorithm: Algorithm, phase: Phase) -> tuple[Exchange, ...]:
    if phase == "validation":
        return (algorithm.validation.exchange,) if algorithm.validation else ()
    if phase == "release":
        return (algorithm.release,) if algorithm.release else ()
    return {"round": algorithm.round, "after_rounds": algorithm.after_rounds, "delivery": algorithm.delivery}[phase]
