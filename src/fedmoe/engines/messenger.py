"""What a session and its workers say to each other: requests cut into cohorts, replies read and checked."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedmoe.algorithms.algorithm import Exchange
from fedmoe.assembly import Parts
from fedmoe.core_types import ClientId, Tensors, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.frames import Cohort, Frames, frame_of, shared
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.protocol import Phase, Transport, exchanges_of
from fedmoe.engines.replies import (
    NO_REPLY,
    Replies,
    Reply,
    read_header,
    read_replies,
    reported_error,
    shown_reason,
    sort_replies,
)
from fedmoe.engines.score_replies import read_scores
from fedmoe.engines.update_checks import UpdateLimits
from fedmoe.errors import MessageError, RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.score_message import VALIDATION
from fedmoe.wire import message

FROZEN = "frozen weights"  # what manifests call the exchange in which public constants are sent
VersionOf = Callable[[ClientId], int]  # the state version that a message names for a client


@dataclass(frozen=True)
class Question:
    """Which exchange, in which step; `version` is that of the states that clients come to, None if they keep none."""

    phase: Phase
    index: int
    step: int
    version: int | None

    @property
    def reply_to(self) -> str:
        """What a reply must repeat: one to another question, such as that of the round before, is rejected."""
        return f"{self.phase}:{self.step}:{self.index}"


@message
class FrozenWeights(NamedTuple):
    """Public constants of the networks, such as a pretrained backbone: sent to a client once, with what comes first."""

    expert: Tensors
    gate: Tensors
    constants: Tensors  # of the algorithm: a common expert


class Messenger:
    def __init__(self, parts: Parts, transport: Transport) -> None:
        self.algorithm, self.num_clients = parts.algorithm, parts.federation.num_clients
        self.cohort_size, self.transport = parts.cohort_size, transport
        self.metrics = (*parts.metrics, *self.algorithm.measured)
        schedule = parts.config.schedule
        self.limits = UpdateLimits(max_norm=schedule.max_update_norm, max_examples=schedule.max_examples)
        self.frozen = FrozenWeights(parts.expert.frozen, parts.gate.frozen, dict(self.algorithm.constants))
        self.have_frozen: set[ClientId] = set()  # clients that were sent the frozen weights
        self._superseded: dict[ClientId, tuple[int, int]] = {}  # states that nodes may drop, not yet told to them

    def exchange(
        self,
        server: Tree,
        question: Question,
        updates: Mapping[ClientId, Sequence[Any]],
        version_of: VersionOf,
        manifest: Manifest,
    ) -> Replies:
        """Ask the clients of `updates`, which are the updates that each has sent earlier in this step."""
        exchange = exchanges_of(self.algorithm, question.phase)[question.index]
        offered = {client: exchange.broadcast(server, client, updates[client]) for client in sorted(updates)}
        broadcasts = shared({client: broadcast for client, broadcast in offered.items() if broadcast is not None})
        header = {
            "do": "exchange", "phase": question.phase, "index": question.index, "round": question.step,
            "version": question.version, "reply_to": question.reply_to,
        }  # fmt: skip
        replies: dict[ClientId, Reply] = {}
        for cohort, frame in self._run(header, self.cohorts(broadcasts, exchange), version_of):
            replies |= read_replies(exchange, cohort, question.reply_to, frame, manifest, self.limits)
        lost = {client: NO_REPLY for client in broadcasts if client not in replies}
        self.count_down(manifest, exchange.name, broadcasts)
        return sort_replies(exchange, question.step, replies | lost, broadcasts, manifest)

    def personalize(
        self, delivered: dict[ClientId, Tree], step: int, final_version: int, version_of: VersionOf, manifest: Manifest
    ) -> Iterator[list[ClientId]]:
        """In two parts at least, since this is long work: a single cohort would leave workers idle.

        Cohorts are cut before finished ones are skipped, so that a stop changes no client's company.
        """
        done = set(self._ask(lambda _: {"do": "personalized", "version": final_version}, delivered))
        cohorts = self.cohorts(delivered, self.algorithm.delivery[-1], most=-(-len(delivered) // 2))
        yield sorted(client for cohort in cohorts if done.issuperset(cohort.clients) for client in cohort.clients)
        rest = [cohort for cohort in cohorts if not done.issuperset(cohort.clients)]
        header = {"do": "personalize", "version": final_version}
        yield from self._private_work(header, rest, version_of, step, manifest)

    def scores(
        self, delivered: dict[ClientId, Tree], step: int, final: int | None, version_of: VersionOf, manifest: Manifest
    ) -> Iterator[list[Score]]:
        """Client by client, of the models before personalisation and, with a `final` version, after it."""
        header = {"do": "score", "final": final, "send": True, "reply_to": f"score:{step}"}
        yield from self._scores(header, delivered, step, version_of, manifest)

    def validation_scores(
        self, delivered: dict[ClientId, Tree], step: int, version_of: VersionOf, manifest: Manifest
    ) -> list[Score]:
        """Of the models before personalisation, on opted-in validation records."""
        header = {"do": "validate", "reply_to": f"validate:{step}"}
        return [score for scores in self._scores(header, delivered, step, version_of, manifest) for score in scores]

    def _scores(
        self,
        header: Mapping[str, Any],
        delivered: dict[ClientId, Tree],
        step: int,
        version_of: VersionOf,
        manifest: Manifest,
    ) -> Iterator[list[Score]]:
        answers = tuple(self.algorithm.scored_answers) if header["do"] == "score" else ("",)
        lost = set(delivered)
        for cohort, frame in self._run(header, self._one_by_one(delivered), version_of):
            lost -= set(cohort.clients)
            scores = read_scores(
                cohort, header["reply_to"], frame, manifest, step, self.num_clients, self.metrics, answers
            )
            yield [score for score in scores if (score.data == VALIDATION) == (header["do"] == "validate")]
        for client in sorted(lost):
            manifest.reject(step, "score", client, str(NO_REPLY.rejection))

    def score_in_private(
        self, delivered: dict[ClientId, Tree], step: int, final: int | None, version_of: VersionOf, manifest: Manifest
    ) -> None:
        """Clients score themselves and keep the figures."""
        header = {"do": "score", "final": final, "send": False, "reply_to": f"score:{step}"}
        for _ in self._private_work(header, self._one_by_one(delivered), version_of, step, manifest):
            pass

    def leave_models(
        self, delivered: dict[ClientId, Tree], step: int, final: int | None, version_of: VersionOf, manifest: Manifest
    ) -> Iterator[list[ClientId]]:
        """Clients whose node has left their personal model as a file of its own."""
        header = {"do": "export", "final": final}
        yield from self._private_work(header, self._one_by_one(delivered), version_of, step, manifest)

    def drop_superseded(self, versions: Mapping[ClientId, tuple[int, int]]) -> None:
        """At once where one worker does it for all; a node is told with the next work that it is asked for."""
        if self.transport.one_store:
            rows = [[client, *these] for client, these in versions.items()]
            self._ask(lambda _: {"do": "drop", "states": rows}, versions)
        else:
            self._superseded |= versions

    def forget(self, version: int, clients: Iterable[ClientId]) -> None:
        self._ask(lambda _: {"do": "forget", "version": version}, clients)

    def missing(self, versions: Mapping[ClientId, int]) -> list[ClientId]:
        """Which of these private states nobody has.

        Of nodes that may not be there at the moment nothing is known: one that lost its state says so when it is asked
        to go on from it, and is rejected until its owner puts it back.
        """
        if not self.transport.one_store:
            return []
        return self._ask(
            lambda clients: {"do": "find_missing", "states": [[client, versions[client]] for client in clients]},
            versions,
        )

    def count_down(self, manifest: Manifest, exchange: str, broadcasts: Mapping[ClientId, Tree]) -> None:
        times = Counter(map(id, broadcasts.values()))
        for broadcast in {id(broadcast): broadcast for broadcast in broadcasts.values()}.values():
            manifest.count_down(exchange, broadcast, times[id(broadcast)])

    def count_frozen(self, manifest: Manifest, clients: Iterable[ClientId]) -> None:
        """Of clients that are reached for the first time."""
        new = set(clients) - self.have_frozen
        if new and any(self.frozen):
            manifest.count_down(FROZEN, self.frozen, len(new))
        self.have_frozen |= new

    def cohorts(self, broadcasts: dict[ClientId, Tree], exchange: Exchange, most: int | None = None) -> list[Cohort]:
        """Clients with equal keys, in the order of ids, in groups whose size does not depend on the workers."""
        if not broadcasts:
            return []
        by_key: dict[Any, list[ClientId]] = {}
        for client in sorted(broadcasts):
            by_key.setdefault(exchange.cohort_key(broadcasts[client]), []).append(client)
        size = self.cohort_size(len(broadcasts)) if callable(self.cohort_size) else self.cohort_size
        size = min(size, most or size)
        groups = [group[i : i + size] for group in by_key.values() for i in range(0, len(group), size)]
        return [Cohort(group, [broadcasts[client] for client in group]) for group in groups]

    def _one_by_one(self, delivered: dict[ClientId, Tree]) -> list[Cohort]:
        return self.cohorts(delivered, self.algorithm.delivery[-1], most=1)

    def _private_work(
        self,
        header: Mapping[str, Any],
        cohorts: Sequence[Cohort],
        version_of: VersionOf,
        step: int,
        manifest: Manifest,
    ) -> Iterator[list[ClientId]]:
        """Work that sends nothing back but that it is done; cohorts of which it was not are on record."""
        left: dict[int, str | None] = {id(cohort): NO_REPLY.rejection for cohort in cohorts}
        for cohort, frame in self._run(header, cohorts, version_of):
            left[id(cohort)] = _not_done(frame, cohort.clients)
            if left[id(cohort)] is None:
                yield cohort.clients
        for cohort in cohorts:
            if reason := left[id(cohort)]:
                for client in cohort.clients:
                    manifest.reject(step, header["do"], client, reason)

    def _run(
        self, header: Mapping[str, Any], cohorts: Sequence[Cohort], version_of: VersionOf
    ) -> Iterator[tuple[Cohort, Bytes]]:
        """Each cohort with the first reply of its worker, as replies arrive: one that arrives twice counts once."""
        headers = []
        for cohort in cohorts:
            told: dict[str, Any] = {"state_versions": list(map(version_of, cohort.clients))}
            known = [client for client in cohort.clients if client in self._superseded]
            if known:
                told["superseded"] = [[client, *self._superseded.pop(client)] for client in known]
            headers.append({**header, **told})
        waiting = set(range(len(cohorts)))
        for index, frame in self.transport.run(Frames(headers, cohorts)):
            if index not in waiting:
                continue
            waiting.remove(index)
            error = reported_error(frame) if self.transport.trusted else None
            if error:
                raise error
            yield cohorts[index], frame

    def _ask(
        self, request: Callable[[Iterable[ClientId]], dict[str, Any]], clients: Iterable[ClientId]
    ) -> list[ClientId]:
        """Which of the clients it is so of: one worker is asked about the store that all share, or each client's own
        node. A node that does not answer is one that it is not so of."""
        if self.transport.one_store:
            header = request(clients)
            for _, frame in self.transport.run([frame_of(header, Cohort([], []), {})]):
                if error := reported_error(frame):
                    raise error
                return list(read_header(frame, clients=list)["clients"])
            raise RunError(f"no worker replied to {header['do']!r}. Run the same command again to resume.")
        asked = list(clients)
        frames = [frame_of(request([client]), Cohort([client], []), {}) for client in asked]
        return [asked[at] for at, frame in self.transport.run(frames) if _not_done(frame, [asked[at]]) is None]


def _not_done(frame: Bytes, clients: list[ClientId]) -> str | None:
    """Why this reply does not say that the work of these clients is done, or None."""
    try:
        if error := reported_error(frame):
            return shown_reason(f"its node reported: {error}")
        done = read_header(frame, clients=list)["clients"]
    except MessageError as error:
        return shown_reason(error)
    return None if done == clients else "it replied for other clients"
