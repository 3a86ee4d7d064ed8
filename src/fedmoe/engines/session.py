"""A run as seen from its server: the verbs of a run over (parts, transport). It knows the contract, not the papers.

`next_round` until `is_trained`, then `deliver`, `personalize`, `score` and `personal_model`; `evaluate` in between. A
*step* is a round, an exchange of `after_rounds`, or the release: what changes the server's state and may be resumed
from. Which version of its private state a client starts from is the session's own business.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe import trees
from fedmoe.algorithms.algorithm import Exchange
from fedmoe.assembly import Parts
from fedmoe.clients.sampling import Drawing
from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.delivery import DeliveryRecord
from fedmoe.engines.frames import shared
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.messenger import Messenger, Question
from fedmoe.engines.protocol import Phase, Transport
from fedmoe.engines.replies import Replies
from fedmoe.engines.state_versions import StateVersions
from fedmoe.engines.steps import Attempt, RoundRecord, Steps
from fedmoe.errors import RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.partition.split import Indices
from fedmoe.streams import numpy_stream

# Enough clients for a steady mean, few enough that cost follows the sample and not the population.
VALIDATION_CLIENTS = 100


class Session:
    def __init__(self, parts: Parts, transport: Transport) -> None:
        self.parts, self.transport = parts, transport
        self.algorithm, self.federation, self.config = parts.algorithm, parts.federation, parts.config
        self.seed = parts.config.seed
        self.schedule = parts.config.schedule
        self._drawing = Drawing(parts.federation.participants, self.schedule.pool, self.schedule.anchors)
        self.plan_rounds(None)
        self.step = 0  # done so far
        self.server: Tree = self.algorithm.init_server(self.seed)
        self.manifest = Manifest()
        self.evaluation_manifest = Manifest()  # of what only intermediate evaluations sent
        self.delivered: dict[ClientId, Tree] = {}
        self._versions = StateVersions(max(len(self.algorithm.round), len(self.algorithm.delivery)) + 1)
        self._delivery_versions: dict[ClientId, int] = {}
        self._delivery_replies: dict[ClientId, list[Any]] = {}
        self._messages = Messenger(parts, transport)
        self._asked: Counter[ClientId] = Counter()  # in how many rounds each client was

    def plan_rounds(self, ended_after: int | None) -> None:
        """As many as the config says, or fewer: `ended_after` is the round that turned out to be the last."""
        self.ended_after = ended_after
        self._steps = Steps(self.algorithm, ended_after or self.schedule.rounds, release=self.schedule.release)
        self.num_rounds, self.num_steps = self._steps.num_rounds, self._steps.total

    def __repr__(self) -> str:
        return f"<Session of {self.parts.title}: {self.step} of {self.num_steps} steps; {self.federation!r}>"

    @property
    def is_trained(self) -> bool:
        return self.step >= self.num_steps

    def resume(self, step: int, server: Tree, history: Iterable[Mapping[str, Any]]) -> None:
        """Go on after `step`, with the server's state of then; `history` has the records of all steps up to it, and
        `manifest` who was rejected in them."""
        self.step, self.server = step, server
        for record in history:
            self._asked.update(record["clients"] if record["phase"] == "round" else ())
            self._versions.count(record["round"], record["clients"], self._versions_counted(record))
            self._messages.have_frozen |= {int(client) for sizes in record["sent"].values() for client in sizes}
        self._messages.have_frozen |= {row["client"] for row in self.manifest.rejected if row["exchange"] != "score"}

    def missing_states(self, history: Iterable[Mapping[str, Any]]) -> list[ClientId]:
        """Clients whose private state after these steps is not where it should be."""
        needed: dict[ClientId, int] = {}
        for record in history:
            needed |= self._versions_counted(record)
        return self._messages.missing(needed) if needed else []

    # Training

    def next_round(self) -> RoundRecord:
        """The next step; its record says if it was abandoned because too few replies were accepted."""
        begun, step, rejected = time.monotonic(), self.step + 1, len(self.manifest.rejected)
        phase = self._steps.phase(step)
        clients, attempt = self._clients_of(phase, step), Attempt(self.server)
        for _ in self._exchanges(attempt, phase, step, clients):
            if attempt.abandoned:
                break
        if not attempt.abandoned:
            self.server = attempt.server
        self._versions.count(step, clients, {} if attempt.abandoned else attempt.versions)
        self.step = step
        if phase == "round" and self._validates_after(step):
            self._validate(step)
        return RoundRecord(
            step, phase, clients, len(self.manifest.rejected) - rejected, attempt.reports, time.monotonic() - begun,
            self.manifest.take_round(), attempt.experts, attempt.abandoned,
        )  # fmt: skip

    def replay(self, clients: Sequence[ClientId]) -> Iterator[Replies]:
        """What the server would receive from these clients in the next round, exchange by exchange.

        For audits, on a copy of the private states: the session itself stays where it is.
        """
        yield from self._exchanges(Attempt(self.server), "round", self.step + 1, clients)

    def replay_after_rounds(self, clients: Sequence[ClientId]) -> Iterator[Replies]:
        """The same for all exchanges after the rounds, each of which goes on from the one before."""
        attempt = Attempt(self.server)
        for step in range(self.num_rounds + 1, self._steps.last_exchange + 1):
            yield from self._exchanges(attempt, "after_rounds", step, clients)

    def drop_superseded(self, durable_step: int) -> None:
        """Private state that no resume can ask for any more may go."""
        versions = self._versions.superseded_by(durable_step)
        if versions and self.algorithm.keeps_client_state:
            self._messages.drop_superseded(versions)

    def forget_later_states(self) -> None:
        """Private state that clients came to after this step, final models included, when more rounds follow it."""
        everyone = range(self.federation.num_clients + self.federation.num_unseen)
        self._messages.forget(self._versions.of(self.step + 1), everyone)

    # After training

    def deliver(self, clients: Sequence[ClientId], recorded: DeliveryRecord | None = None) -> None:
        """What each client is left with. Clients that opted out are asked nothing on the way.

        Nobody is asked anything where it is `recorded` what clients replied.
        """
        self._delivery_versions = {} if recorded is None else dict(recorded.versions)
        self.delivered = self._deliver(self.server, clients, self.manifest, keep=True, recorded=recorded)

    @property
    def delivery_record(self) -> DeliveryRecord:
        return DeliveryRecord(self._delivery_replies, self._delivery_versions)

    def personalize(self) -> Iterator[list[ClientId]]:
        """Clients as they finish. A cohort that finished before a stop is not trained again."""
        named = self._versions.after(self._delivery_versions)
        yield from self._messages.personalize(self.delivered, self.step, self._final_version, named, self.manifest)

    def score(self) -> Iterator[list[Score]]:
        """Scores before and after personalisation, client by client, of those that are asked.

        The others score themselves and keep the figures.
        """
        final = self._final_version if self.algorithm.personalize else None
        named = self._versions.after(self._delivery_versions)
        asked = [client for client in self.delivered if self._is_asked(client)]
        others = [client for client in self.delivered if not self._is_asked(client)]
        yield from self._messages.scores({c: self.delivered[c] for c in asked}, self.step, final, named, self.manifest)
        unasked = {client: self.delivered[client] for client in others}
        self._messages.score_in_private(unasked, self.step, final, named, self.manifest)

    def leave_models(self) -> Iterator[list[ClientId]]:
        """Clients whose node keeps their personal model as a file, as they finish. No model is sent."""
        final = self._final_version if self.algorithm.personalize else None
        named = self._versions.after(self._delivery_versions)
        yield from self._messages.leave_models(self.delivered, self.step, final, named, self.manifest)

    def personal_model(self, client: ClientId) -> PersonalModel:
        """The model that a client ended with, once it was delivered and personalised."""
        if client not in self.delivered:
            raise RunError(f"client {client} was not personalised: evaluation.clients left it out.")
        state = self._versions.after(self._delivery_versions)(client)
        final = self._final_version if self.algorithm.personalize else None
        return self.transport.personal_model(self.delivered[client], client, state, final)

    def evaluate(self, clients: Sequence[ClientId]) -> list[Score]:
        """What clients would score if the rounds ended here. They keep nothing of it, and training never notices."""
        delivered = self._delivered_now(clients)
        asked = {client: delivered[client] for client in clients if self._is_asked(client)}
        batches = self._messages.scores(asked, self.step, None, self._versions.after({}), self.manifest)
        return [score for scores in batches for score in scores]

    def validation_scores(self) -> list[Score]:
        """The same on opted-in validation records, of the clients that validate: what may end the rounds."""
        delivered = self._delivered_now(self._validators)
        return self._messages.validation_scores(delivered, self.step, self._versions.after({}), self.manifest)

    def _delivered_now(self, clients: Sequence[ClientId]) -> dict[ClientId, Tree]:
        """What clients would be left with if the rounds ended here."""
        server = self.server
        if self._steps.releases and self.step < self.num_steps:
            attempt = Attempt(server)
            for _ in self._exchanges(attempt, "release", self.step + 1, self._everyone, evaluating=True):
                server = attempt.server
        return self._deliver(server, clients, self.evaluation_manifest, keep=False)

    # Steps

    @property
    def _everyone(self) -> list[ClientId]:
        return [int(client) for client in self.federation.participants]

    def _clients_of(self, phase: Phase, step: int) -> list[ClientId]:
        if phase != "round":
            return self._everyone
        rng = numpy_stream(self.seed, "sample", step)
        sampled = self.algorithm.sample(self.server, step, self._with_budget(self._drawing.others(step)), rng)
        anchors = self._drawing.draw_anchors(step, numpy_stream(self.seed, "sample anchors", step))
        drawn = {int(client) for client in (*sampled, *self._with_budget(anchors))} if len(sampled) else set()
        self._asked.update(drawn)
        return sorted(drawn)

    def _with_budget(self, clients: Indices) -> Indices:
        """Those that have privacy left to spend: how much a round costs is public."""
        most = self.parts.privacy.max_rounds if self.parts.privacy else None
        return clients if most is None else clients[[self._asked[int(client)] < most for client in clients]]

    def _exchanges(
        self, attempt: Attempt, phase: Phase, step: int, clients: Sequence[ClientId], *, evaluating: bool = False
    ) -> Iterator[Replies]:
        """The exchanges of a step one after another. Who was rejected sits out the rest of it."""
        updates: dict[ClientId, list[Any]] = {client: [] for client in clients}
        for index, exchange in self._steps.exchanges(phase, step):
            replies = self._exchange(attempt, phase, index, step, updates, evaluating)
            for client, update in replies.updates.items():
                updates[client].append(update)
            updates = {client: earlier for client, earlier in updates.items() if client not in replies.rejected}
            attempt.abandoned = self._too_few(exchange, replies)
            if replies.updates and not attempt.abandoned:
                before, attempt.server = attempt.server, exchange.aggregate(attempt.server, *replies[:3])
                if exchange.observe:
                    attempt.experts = exchange.observe(before, attempt.server, *replies[:3]).as_event()
                attempt.reports |= _mean_reports(replies.reports)
                attempt.reports |= exchange.figures(before, replies.updates) if exchange.figures else {}
            yield replies

    def _too_few(self, exchange: Exchange, replies: Replies) -> str | None:
        asked, accepted = len(replies.updates) + len(replies.rejected), len(replies.updates)
        if accepted >= min(self.schedule.min_clients, asked):
            return None
        client, reason = next(iter(sorted(replies.rejected.items())))
        return (
            f"{accepted} of {asked} replies to {exchange.name!r} were accepted, fewer than "
            f"schedule.min_clients={self.schedule.min_clients} (client {client}: {reason})"
        )

    def _exchange(
        self,
        attempt: Attempt,
        phase: Phase,
        index: int,
        step: int,
        updates: Mapping[ClientId, Sequence[Any]],
        evaluating: bool = False,
    ) -> Replies:
        keep = not evaluating and phase not in ("validation", "release") and self.algorithm.keeps_client_state
        version = self._versions.of(step, 0 if phase == "after_rounds" else index) if keep else None
        manifest = self.evaluation_manifest if evaluating else self.manifest
        named = self._versions.after(attempt.versions)
        replies = self._messages.exchange(
            attempt.server, Question(phase, index, step, version), updates, named, manifest
        )
        if not evaluating:
            self._messages.count_frozen(manifest, {*replies.updates, *replies.rejected})
        if version is not None:
            attempt.versions |= dict.fromkeys(replies.updates, version)
        return replies

    def _versions_counted(self, record: Mapping[str, Any]) -> dict[ClientId, int]:
        """As `_exchange` counted them: by whom the record says that something was accepted."""
        if not self.algorithm.keeps_client_state or record["phase"] == "release" or record["abandoned"]:
            return {}
        versions: dict[ClientId, int] = {}
        for index, (_, exchange) in enumerate(self._steps.exchanges(record["phase"], record["round"])):
            sent = record["sent"].get(exchange.name, {})
            versions |= dict.fromkeys(map(int, sent), self._versions.of(record["round"], index))
        return versions

    # Validation: the same clients each time, or the best round would be a matter of who was asked

    def _validates_after(self, step: int) -> bool:
        """Also where the rounds may end: whatever round is the last, it has been validated."""
        validation = self.algorithm.validation
        may_be_last = step == self.num_rounds or self.schedule.may_end_after(step)
        return validation is not None and (step % validation.every == 0 or may_be_last)

    @property
    def _validators(self) -> list[ClientId]:
        pool = self.federation.participants
        if len(pool) > VALIDATION_CLIENTS:
            rng = numpy_stream(self.seed, "validators")
            pool = pool[rng.choice(len(pool), VALIDATION_CLIENTS, replace=False, shuffle=False)]
        return [int(client) for client in sorted(pool)]

    def _validate(self, step: int) -> None:
        validation, attempt = self.algorithm.validation, Attempt(self.server)
        assert validation is not None
        replies = self._exchange(attempt, "validation", 0, step, {client: [] for client in self._validators})
        if replies.updates:
            self.server = validation.exchange.aggregate(self.server, *replies[:3])

    # Delivery and scores

    @property
    def _final_version(self) -> int:
        return self._versions.of(self.num_steps + 2)

    def _deliver(
        self,
        server: Tree,
        clients: Sequence[ClientId],
        manifest: Manifest,
        *,
        keep: bool,
        recorded: DeliveryRecord | None = None,
    ) -> dict[ClientId, Tree]:
        known = recorded.replies if recorded else {}
        updates: dict[ClientId, list[Any]] = {client: list(known.get(client, ())) for client in clients}
        *questions, last = self.algorithm.delivery
        attempt = Attempt(server, self._delivery_versions if keep else {})
        step = (self._steps.last_exchange if keep else self.step) + 1
        for index, _ in enumerate(() if recorded else questions):
            asked = {client: updates[client] for client in clients if self.federation.may_send(client)}
            replies = self._exchange(attempt, "delivery", index, step, asked, evaluating=not keep)
            for client, update in replies.updates.items():
                updates[client].append(update)
        broadcasts = shared({client: last.broadcast(server, client, updates[client]) for client in clients})
        self._messages.count_down(manifest, last.name, broadcasts)
        if keep:
            self._delivery_replies = updates
            self._messages.count_frozen(manifest, broadcasts)
        return broadcasts

    def _is_asked(self, client: ClientId) -> bool:
        """Who is asked for scores; the client has the last word."""
        wanted = self.config.evaluation.clients_asked
        return wanted == "all" or (wanted == "opted_in" and self.federation.may_send(client))


def _mean_reports(reports: Mapping[ClientId, Any]) -> dict[str, float]:
    if not reports:
        return {}
    named = [trees.to_named(report) for report in reports.values()]
    return {name: fmean(float(one[name]) for one in named) for name in named[0]}
