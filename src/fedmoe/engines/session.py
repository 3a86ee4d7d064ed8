"""The server's side of an engine: rounds, delivery, personalisation, scores. It knows the contract, not the papers.

How frames reach workers is a `Transport`'s business, so the same coordinator drives one process, many, or a network.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.clients.federation import Federation
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes, Parts
from fedmoe.engines.frames import Cohort, frame_of, shared
from fedmoe.engines.manifest import Manifest, Sent
from fedmoe.engines.replies import Replies, Reply, read_replies, reported_error, sort_replies
from fedmoe.engines.update_checks import UpdateLimits
from fedmoe.engines.worker import find_exchange
from fedmoe.errors import RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.streams import numpy_stream

# Enough clients for a steady mean, few enough that cost follows the sample and not the population.
VALIDATION_CLIENTS = 100


class Transport(Protocol):
    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        """(index of the frame, answer), as answers arrive."""


class RoundRecord(NamedTuple):
    round: int
    clients: list[ClientId]
    refused: int
    reports: dict[str, float]  # mean over the clients that told
    seconds: float
    sent: Sent  # bytes by exchange and client
    experts: dict[str, Any]  # what the server saw of them, as `aggregation.experts.Observation` tells it
    warnings: Sequence[str] = ()


class Coordinator:
    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        transport: Transport,
        *,
        seed: int,
        rounds: int,
        cohort_size: int | Callable[[int], int],
        manifest: Manifest,
        max_update_norm: float | None = None,
    ) -> None:
        self.algorithm, self.federation, self.transport = algorithm, federation, transport
        self.seed, self.rounds, self.cohort_size = seed, rounds, cohort_size
        self.manifest, self.max_update_norm = manifest, max_update_norm

    def run_round(self, server: Tree, round_number: int) -> tuple[Tree, RoundRecord]:
        """All exchanges of one round (rounds count from 1), and the validation where it is due."""
        start, refused = time.monotonic(), len(self.manifest.rejected)
        rng = numpy_stream(self.seed, "sample", round_number)
        sampled = self.algorithm.sample(server, round_number, self.federation.participants, rng)
        clients = sorted(int(client) for client in sampled)
        answers: dict[ClientId, list[Any]] = {client: [] for client in clients}
        means: dict[str, float] = {}
        experts: dict[str, Any] = {}
        for index, exchange in enumerate(self.algorithm.round):
            replies = self.exchange(server, "round", index, round_number, answers)
            for client, update in replies.updates.items():
                answers[client].append(update)
            answers = {client: told for client, told in answers.items() if client not in replies.rejected}
            before, server = server, exchange.aggregate(server, *replies[:3]) if replies.updates else server
            if exchange.observe and replies.updates:
                experts = exchange.observe(before, server, *replies[:3]).as_event()
            means |= _mean_reports(replies.reports)
        validation = self.algorithm.validation
        if validation and (round_number % validation.every == 0 or round_number == self.rounds):
            scores = self.exchange(
                server, "validation", 0, round_number, {c: [] for c in self._validators(round_number)}
            )
            server = validation.exchange.aggregate(server, *scores[:3])
        seconds = time.monotonic() - start
        refused = len(self.manifest.rejected) - refused
        return server, RoundRecord(round_number, clients, refused, means, seconds, self.manifest.take_round(), experts)

    def collect_release(self, server: Tree, look_after: int | None = None) -> Tree:
        """The declared gift of private parts, once, from everyone who opted in; `look_after` as in `deliver`."""
        release = self.algorithm.release
        if release is None:
            raise RunError("schedule.release is on, but this algorithm has nothing to release. Turn it off.")
        everyone: dict[ClientId, list[Any]] = {int(client): [] for client in self.federation.participants}
        replies = self.exchange(server, "release", 0, self._next_round(look_after), everyone, look_after is None)
        return release.aggregate(server, *replies[:3])

    def deliver(self, server: Tree, clients: Sequence[ClientId], look_after: int | None = None) -> dict[ClientId, Tree]:
        """What each client keeps. Clients that opted out are asked nothing on the way.

        `look_after` is a round after which the state is only looked at: clients keep nothing, and training goes on as
        if nobody had looked.
        """
        answers: dict[ClientId, list[Any]] = {client: [] for client in clients}
        *questions, last = self.algorithm.delivery
        for index, _ in enumerate(questions):
            asked = {client: answers[client] for client in clients if self.federation.may_send(client)}
            told = self.exchange(server, "delivery", index, self._next_round(look_after), asked, look_after is None)
            for client, update in told.updates.items():
                answers[client].append(update)
        broadcasts = shared({client: last.broadcast(server, client, answers[client]) for client in clients})
        self._count_down(last.name, broadcasts)
        return broadcasts

    def personalize(self, kept: dict[ClientId, Tree]) -> Iterator[list[ClientId]]:
        """Clients as they finish. Those that finished before a stop are not trained again."""
        clock = self.final_clock
        done = set(self._ask({"do": "personalized", "clock": clock})["clients"])
        yield sorted(done & set(kept))
        yield from self._on_cohorts(
            {"do": "personalize", "clock": clock}, {c: b for c, b in kept.items() if c not in done}
        )

    def score(self, kept: dict[ClientId, Tree], look_after: int | None = None) -> Iterator[list[Score]]:
        """Before and after personalisation; on a look before it, with the private states of that round."""
        clock = self.final_clock if look_after is None else self._clock(look_after + 1, 0)
        header = {"do": "score", "clock": clock, "personalized": look_after is None}
        for answer in self._answers(header, self.cohorts(kept, self.algorithm.delivery[-1], most=1)):
            yield [Score(**score) for score in answer["scores"]]

    def forget_superseded(self, round_number: int) -> None:
        """Private state that no resume can ask for any more may go."""
        self._ask({"do": "forget", "clock": self._clock(round_number, len(self.algorithm.round) + 1)})

    def exchange(
        self,
        server: Tree,
        phase: str,
        index: int,
        round_number: int,
        answers: dict[ClientId, list[Any]],
        keep: bool = True,
    ) -> Replies:
        """`keep` tells clients to keep the private state that they come to."""
        exchange = find_exchange(self.algorithm, phase, index)
        offered = {client: exchange.broadcast(server, client, answers[client]) for client in sorted(answers)}
        broadcasts = shared({client: broadcast for client, broadcast in offered.items() if broadcast is not None})
        slot = len(self.algorithm.round) if phase in ("validation", "release") else index
        reply_to = f"round {round_number}, {phase} {index}"
        header = {
            "do": "exchange", "phase": phase, "index": index,
            "round": round_number, "clock": self._clock(round_number, slot), "keep": keep,
            "reply_to": reply_to,
        }  # fmt: skip
        told: dict[ClientId, Reply] = {}
        cohorts, limits = self.cohorts(broadcasts, exchange), UpdateLimits(self.max_update_norm)
        for place, frame in self._frames(header, cohorts):
            told |= read_replies(exchange, cohorts[place], reply_to, frame, self.manifest, limits)
        self._count_down(exchange.name, broadcasts)
        return sort_replies(exchange, round_number, told, broadcasts, self.manifest)

    def cohorts(self, broadcasts: dict[ClientId, Tree], exchange: Exchange, most: int | None = None) -> list[Cohort]:
        """Clients with equal keys, in the order of ids, in groups whose size does not depend on the workers."""
        if not broadcasts:
            return []
        by_key: dict[Any, list[ClientId]] = {}
        for client in sorted(broadcasts):
            by_key.setdefault(exchange.cohort_key(broadcasts[client]), []).append(client)
        size = self.cohort_size(len(broadcasts)) if callable(self.cohort_size) else self.cohort_size
        size = min(size, most or size)
        parts = [group[i : i + size] for group in by_key.values() for i in range(0, len(group), size)]
        return [Cohort(part, [broadcasts[client] for client in part]) for part in parts]

    def _count_down(self, exchange: str, broadcasts: dict[ClientId, Tree]) -> None:
        times = Counter(map(id, broadcasts.values()))
        for broadcast in {id(broadcast): broadcast for broadcast in broadcasts.values()}.values():
            self.manifest.count_down(exchange, broadcast, times[id(broadcast)])

    def _validators(self, round_number: int) -> list[ClientId]:
        pool = self.federation.participants
        if len(pool) > VALIDATION_CLIENTS:
            rng = numpy_stream(self.seed, "validators", round_number)
            pool = pool[rng.choice(len(pool), VALIDATION_CLIENTS, replace=False, shuffle=False)]
        return sorted(int(client) for client in pool)

    @property
    def final_clock(self) -> int:
        return self._clock(self.rounds + 2, 0)

    def _next_round(self, look_after: int | None) -> int:
        return (self.rounds if look_after is None else look_after) + 1

    def _clock(self, round_number: int, slot: int) -> int:
        """Private state is kept by client and clock: round, then place within it."""
        return round_number * (max(len(self.algorithm.round), len(self.algorithm.delivery)) + 2) + slot

    def _on_cohorts(self, header: dict[str, Any], kept: dict[ClientId, Tree]) -> Iterator[list[ClientId]]:
        """In two parts at least, since this is long work: a single cohort would leave workers idle."""
        halves = self.cohorts(kept, self.algorithm.delivery[-1], most=-(-len(kept) // 2))
        for answer in self._answers(header, halves):
            yield answer["clients"]

    def _answers(self, header: dict[str, Any], cohorts: list[Cohort]) -> Iterator[dict[str, Any]]:
        yield from (answer for answer, _ in self._run(header, cohorts))

    def _ask(self, header: dict[str, Any]) -> dict[str, Any]:
        return next(answer for answer, _ in self._run(header, [Cohort([], [])]))

    def _run(self, header: dict[str, Any], cohorts: list[Cohort]) -> Iterator[tuple[dict[str, Any], list[memoryview]]]:
        yield from (wire.unpack(frame) for _, frame in self._frames(header, cohorts))

    def _frames(self, header: dict[str, Any], cohorts: list[Cohort]) -> Iterator[tuple[int, Bytes]]:
        encoded: dict[int, Parts] = {}
        for place, frame in self.transport.run([frame_of(header, cohort, encoded) for cohort in cohorts]):
            if error := reported_error(frame):
                raise error
            yield place, frame


def _mean_reports(reports: dict[ClientId, Any]) -> dict[str, float]:
    if not reports:
        return {}
    named = [trees.to_named(report) for report in reports.values()]
    return {name: fmean(float(one[name]) for one in named) for name in named[0]}
