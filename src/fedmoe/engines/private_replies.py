"""Replies under differential privacy: paid for in the client's ledger before they leave, and repeated, not redrawn."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedmoe.assembly import Parts
from fedmoe.clients.privacy_ledger import Paid, PrivacyLedger, ledger_beside
from fedmoe.core_types import ClientId
from fedmoe.encoding import Parts as EncodedParts
from fedmoe.engines.requests import Header
from fedmoe.errors import RunError
from fedmoe.private_steps import PrivateSteps
from fedmoe.run_privacy import RunPrivacy

Replies = tuple[list[list[ClientId]], list[EncodedParts]]
OpenLedger = Callable[[Path, str, Mapping[str, Any]], PrivacyLedger]
Compute = Callable[[Header, Sequence[memoryview], PrivateSteps | None], Replies]


class PrivateReplies:
    """The ledger of the clients that a worker serves, and the rules by which they spend."""

    def __init__(
        self, privacy: RunPrivacy, seed: int, keep_rounds: int, open_ledger: Callable[[], PrivacyLedger]
    ) -> None:
        self.privacy, self.seed, self.keep_rounds = privacy, seed, keep_rounds
        self._open_ledger = open_ledger
        open_ledger().close()  # here, once: see `Worker`
        self._ledger: PrivacyLedger | None = None

    @classmethod
    def of(
        cls, parts: Parts, store: Path, run_id: str, open_ledger: OpenLedger = PrivacyLedger
    ) -> "PrivateReplies | None":
        privacy = parts.privacy
        if privacy is None:
            return None
        keep_rounds = 2 * parts.config.schedule.checkpoint_every + 2  # as far back as a resume may begin, and a spare
        opened = partial(open_ledger, ledger_beside(store), run_id, privacy.facts())
        return cls(privacy, parts.config.seed, keep_rounds, opened)

    @property
    def ledger(self) -> PrivacyLedger:
        """Opened at first use: an SQLite connection must not be carried across a fork."""
        if self._ledger is None:
            self._ledger = self._open_ledger()
        return self._ledger

    def close(self) -> None:
        if self._ledger:
            self._ledger.close()
            self._ledger = None

    def answer(self, header: Header, blobs: Sequence[memoryview], compute: Compute) -> Replies:
        """Clients that sent a reply to this very question send it again; those whose budget is spent send nothing."""
        requests = dict(zip(header["clients"], _requests(header, blobs), strict=True))
        known = {client: reply for client, one in requests.items() if (reply := self.ledger.reply(client, one))}
        fresh = [client for client in requests if client not in known and self._has_budget(client)]
        paid = self._pay(header, blobs, compute, fresh, requests) if fresh else {}
        replies = {**known, **{client: one.reply for client, one in paid.items()}}
        return [[client] for client in sorted(replies)], [[replies[client]] for client in sorted(replies)]

    def _pay(
        self,
        header: Header,
        blobs: Sequence[memoryview],
        compute: Compute,
        fresh: list[ClientId],
        requests: dict[ClientId, bytes],
    ) -> dict[ClientId, Paid]:
        privacy, ledger = self.privacy, self.ledger
        steps = PrivateSteps(
            privacy.mechanism,
            {client: ledger.key(client, privacy.source, self.seed) for client in fresh},
            {client: ledger.next_step(client) for client in fresh},
        )
        groups, replies = compute(_of_clients(header, fresh), blobs, steps)
        paid = {}
        for (client,), reply in zip(groups, replies, strict=True):
            if not any(charge.kind == "gradient" for charge in steps.taken.get(client, ())):
                raise RunError(f"client {client} would send an update without noise: the algorithm is at fault.")
            paid[client] = Paid(requests[client], steps.taken[client], b"".join(reply))
        ledger.record(header["round"], paid, self.keep_rounds)
        return paid

    def _has_budget(self, client: ClientId) -> bool:
        most = self.privacy.max_steps
        return most is None or self.ledger.next_step(client) + self.privacy.steps_per_round <= most


def _of_clients(header: Header, clients: Sequence[ClientId]) -> Header:
    """The same request for some of its clients."""
    places = [header["clients"].index(client) for client in clients]
    per_client = ("clients", "state_versions", "broadcast_index")
    return {**header, **{name: [header[name][place] for place in places] for name in per_client}}


def _requests(header: Header, blobs: Sequence[memoryview]) -> list[bytes]:
    """For each client a digest of what it is asked: the exchange, the round, its state and its broadcast."""
    broadcasts = [hashlib.blake2b(blob, digest_size=32).digest() for blob in blobs]
    question: Any = (header["phase"], header["index"], header["round"])
    return [
        hashlib.blake2b(repr((*question, version)).encode() + broadcasts[index], digest_size=32).digest()
        for version, index in zip(header["state_versions"], header["broadcast_index"], strict=True)
    ]
