"""The server's side of an engine: rounds, delivery, personalisation, scores. It knows the contract, not the papers.

How frames reach workers is a `Transport`'s business, so the same coordinator drives one process, many, or a network.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.clients.federation import Federation
from fedmoe.engines.door import fault_in_report, fault_in_update
from fedmoe.engines.manifest import Manifest, Sent
from fedmoe.engines.worker import ERRORS, find_exchange
from fedmoe.errors import MessageError, RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.streams import numpy_stream
from fedmoe.vocabulary import ClientId, Tree

# Enough clients for a steady mean, few enough that cost follows the sample and not the population.
VALIDATION_CLIENTS = 100

# Which tensors a broadcast holds, under which names.
Identity = tuple[tuple[str, int], ...]


class Transport(Protocol):
    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
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


class Replies(NamedTuple):
    """What `aggregate` is given, by client id; and who was refused."""

    updates: dict[ClientId, Any]
    reports: dict[ClientId, Any]
    sent: dict[ClientId, Any]
    refused: set[ClientId]


class Cohort(NamedTuple):
    clients: list[ClientId]
    broadcasts: list[Tree]


class Coordinator:
    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        transport: Transport,
        *,
        seed: int,
        rounds: int,
        cohort_size: int,
        manifest: Manifest,
        max_update_norm: float | None = None,
    ) -> None:
        self.algorithm, self.federation, self.transport = algorithm, federation, transport
        self.seed, self.rounds, self.cohort_size = seed, rounds, cohort_size
        self.manifest, self.max_update_norm = manifest, max_update_norm

    def run_round(self, server: Tree, round_number: int) -> tuple[Tree, RoundRecord]:
        """All exchanges of one round (rounds count from 1), and the validation where it is due."""
        start, refused = time.monotonic(), len(self.manifest.refused)
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
            answers = {client: told for client, told in answers.items() if client not in replies.refused}
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
        refused = len(self.manifest.refused) - refused
        return server, RoundRecord(round_number, clients, refused, means, seconds, self.manifest.take_round(), experts)

    def collect_release(self, server: Tree) -> Tree:
        """The declared gift of private parts, once, from everyone who opted in."""
        release = self.algorithm.release
        if release is None:
            raise RunError("schedule.release is on, but this algorithm has nothing to release. Turn it off.")
        everyone: dict[ClientId, list[Any]] = {int(client): [] for client in self.federation.participants}
        replies = self.exchange(server, "release", 0, self.rounds + 1, everyone)
        return release.aggregate(server, *replies[:3])

    def deliver(self, server: Tree, clients: Sequence[ClientId]) -> dict[ClientId, Tree]:
        """What each client keeps. Clients that opted out are asked nothing on the way."""
        answers: dict[ClientId, list[Any]] = {client: [] for client in clients}
        *questions, last = self.algorithm.delivery
        for index, _ in enumerate(questions):
            asked = {client: answers[client] for client in clients if self.federation.may_send(client)}
            for client, update in self.exchange(server, "delivery", index, self.rounds + 1, asked).updates.items():
                answers[client].append(update)
        broadcasts = {client: last.broadcast(server, client, answers[client]) for client in clients}
        for broadcast in broadcasts.values():
            self.manifest.count_down(last.name, trees.to_named(broadcast), 1)
        return broadcasts

    def personalize(self, kept: dict[ClientId, Tree]) -> Iterator[list[ClientId]]:
        """Clients as they finish. Those that finished before a stop are not trained again."""
        clock = self.final_clock
        done = set(self._ask({"do": "personalized", "clock": clock})["clients"])
        yield sorted(done & set(kept))
        yield from self._on_cohorts(
            {"do": "personalize", "clock": clock}, {c: b for c, b in kept.items() if c not in done}
        )

    def score(self, kept: dict[ClientId, Tree]) -> Iterator[list[Score]]:
        header = {"do": "score", "clock": self.final_clock}
        for answer in self._answers(header, self.cohorts(kept, self.algorithm.delivery[-1], size=1)):
            yield [Score(**score) for score in answer["scores"]]

    def forget_superseded(self, round_number: int) -> None:
        """Private state that no resume can ask for any more may go."""
        self._ask({"do": "forget", "clock": self._clock(round_number, len(self.algorithm.round) + 1)})

    def exchange(
        self, server: Tree, phase: str, index: int, round_number: int, answers: dict[ClientId, list[Any]]
    ) -> Replies:
        exchange = find_exchange(self.algorithm, phase, index)
        offered = {client: exchange.broadcast(server, client, answers[client]) for client in sorted(answers)}
        broadcasts = {client: broadcast for client, broadcast in offered.items() if broadcast is not None}
        slot = len(self.algorithm.round) if phase in ("validation", "release") else index
        header = {
            "do": "exchange", "phase": phase, "index": index,
            "round": round_number, "clock": self._clock(round_number, slot),
        }  # fmt: skip
        arrived: dict[ClientId, list[bytes]] = {}
        for answer, blobs in self._run(header, self.cohorts(broadcasts, exchange)):
            for place, client in enumerate(answer["clients"]):
                arrived[client] = blobs[2 * place : 2 * place + 2]
        replies = Replies({}, {}, {}, set())
        for client in sorted(arrived):  # so that the manifest does not depend on who answered first
            update, report = arrived.pop(client)
            self._receive(exchange, round_number, client, broadcasts[client], update, report, replies)
        for broadcast in broadcasts.values():
            self.manifest.count_down(exchange.name, trees.to_named(broadcast), 1)
        return replies

    def cohorts(self, broadcasts: dict[ClientId, Tree], exchange: Exchange, size: int | None = None) -> list[Cohort]:
        """Clients with equal keys, in the order of ids, in groups whose size does not depend on the workers."""
        by_key: dict[Any, list[ClientId]] = {}
        for client in sorted(broadcasts):
            by_key.setdefault(exchange.cohort_key(broadcasts[client]), []).append(client)
        size = size or self.cohort_size
        parts = [group[i : i + size] for group in by_key.values() for i in range(0, len(group), size)]
        return [Cohort(part, [broadcasts[client] for client in part]) for part in parts]

    def _receive(
        self,
        exchange: Exchange,
        round_number: int,
        client: ClientId,
        sent: Tree,
        update: bytes,
        report: bytes,
        into: Replies,
    ) -> None:
        try:
            tensors, numbers = wire.decode_named(update), wire.decode_named(report)
            fault = fault_in_update(tensors, exchange.update_like(sent), sent, self.max_update_norm)
            fault = fault or fault_in_report(numbers, exchange.report_type._fields)
            answer = None if fault else trees.from_named(exchange.update_type, tensors)
            fault = fault or exchange.fault(answer, sent)
        except MessageError as error:
            fault = str(error)
        if fault:
            self.manifest.refuse(round_number, exchange.name, client, fault)
            into.refused.add(client)
            return
        self.manifest.count_up(exchange.name, client, tensors, numbers)
        into.updates[client] = answer
        into.reports[client] = trees.from_named(exchange.report_type, numbers)
        into.sent[client] = sent

    def _validators(self, round_number: int) -> list[ClientId]:
        pool = self.federation.participants
        if len(pool) > VALIDATION_CLIENTS:
            rng = numpy_stream(self.seed, "validators", round_number)
            pool = pool[rng.choice(len(pool), VALIDATION_CLIENTS, replace=False, shuffle=False)]
        return sorted(int(client) for client in pool)

    @property
    def final_clock(self) -> int:
        return self._clock(self.rounds + 2, 0)

    def _clock(self, round_number: int, slot: int) -> int:
        """Private state is kept by client and clock: round, then place within it."""
        return round_number * (max(len(self.algorithm.round), len(self.algorithm.delivery)) + 2) + slot

    def _on_cohorts(self, header: dict[str, Any], kept: dict[ClientId, Tree]) -> Iterator[list[ClientId]]:
        for answer in self._answers(header, self.cohorts(kept, self.algorithm.delivery[-1])):
            yield answer["clients"]

    def _answers(self, header: dict[str, Any], cohorts: list[Cohort]) -> Iterator[dict[str, Any]]:
        yield from (answer for answer, _ in self._run(header, cohorts))

    def _ask(self, header: dict[str, Any]) -> dict[str, Any]:
        return next(answer for answer, _ in self._run(header, [Cohort([], [])]))

    def _run(self, header: dict[str, Any], cohorts: list[Cohort]) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        encoded: dict[Identity, bytes] = {}
        frames = [_frame(header, cohort, encoded) for cohort in cohorts]
        for _, frame in self.transport.run(frames):
            answer, blobs = wire.unpack(frame)
            if "error" in answer:
                raise ERRORS.get(answer["error"], RunError)(answer["message"])
            yield answer, blobs


def _frame(header: dict[str, Any], cohort: Cohort, encoded: dict[Identity, bytes]) -> bytes:
    """A cohort's work; a broadcast that several clients share is encoded and sent once."""
    blobs: dict[Identity, int] = {}
    which = []
    for broadcast in cohort.broadcasts:
        # Names too: the same tensors under other names, such as one start for several experts, are another message.
        identity = tuple((name, id(leaf)) for name, leaf in trees.to_named(broadcast).items())
        if identity not in encoded:
            encoded[identity] = wire.encode(broadcast)
        which.append(blobs.setdefault(identity, len(blobs)))
    return wire.pack({**header, "clients": cohort.clients, "which": which}, [encoded[identity] for identity in blobs])


def _mean_reports(reports: dict[ClientId, Any]) -> dict[str, float]:
    if not reports:
        return {}
    named = [trees.to_named(report) for report in reports.values()]
    return {name: float(torch.stack([one[name] for one in named]).double().mean()) for name in named[0]}
