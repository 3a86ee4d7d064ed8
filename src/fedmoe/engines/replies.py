"""What clients reply: read, checked, counted, and sorted into what is accepted and what is rejected.

A reply may hold any bytes. Nothing here raises because of them: whoever sent them is rejected with the reason, and the
round goes on with the others.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Exchange, accept
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.frames import Cohort
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.update_checks import UpdateLimits, report_rejections, update_rejections
from fedmoe.errors import ConfigError, DataError, FedmoeError, MessageError, RunError

ERRORS: dict[str, type[FedmoeError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, MessageError, RunError)
}
MAX_REASON = 300  # characters of a rejection's reason; clients choose some of them
HEADER_ROOM = 1 << 16  # bytes that the header of a reply may take, and 64 for each client in it
MESSAGE_ROOM = 1 << 20  # bytes that a message may take beyond its tensors, and 1024 for each of them


class Reply(NamedTuple):
    """One client's update and report, or why they are rejected."""

    rejection: str | None
    update: Any = None
    report: Any = None


NO_REPLY = Reply("it did not reply")


class Replies(NamedTuple):
    """What `aggregate` is given, by client id; and who was rejected, with the reason."""

    updates: dict[ClientId, Any]
    reports: dict[ClientId, Any]
    sent: dict[ClientId, Any]
    rejected: dict[ClientId, str]


def read_replies(
    exchange: Exchange, cohort: Cohort, reply_to: str, frame: Bytes, manifest: Manifest, limits: UpdateLimits
) -> dict[ClientId, Reply]:
    """A reply for each client of the cohort, whatever the frame holds: accepted, and counted, or rejected."""
    sent = dict(zip(cohort.clients, cohort.broadcasts, strict=True))
    try:
        groups, blobs = read_groups(frame, reply_to, len(sent))
    except Exception as error:
        return dict.fromkeys(sent, Reply(shown_reason(error)))
    times = Counter(client for group in groups for client in group)
    others = sorted(times.keys() - sent.keys())
    absent = Reply(f"it did not reply; client {others[0]}, which was not asked, did") if others else NO_REPLY
    replies = dict.fromkeys(sent, absent)
    for group, blob in zip(groups, blobs, strict=True):
        earlier = [f"it is named {times[client]} times in one reply" if times[client] > 1 else None for client in group]
        if not sent.keys() >= set(group):
            earlier = [f"it replied together with client {others[0]}, which was not asked"] * len(group)
        try:
            read = _read_group(exchange, group, sent, blob, earlier, manifest, limits)
        except Exception as error:  # of our own checks too: what a client sent must not end the run
            read = [Reply(shown_reason(error))] * len(group)
        replies |= {client: reply for client, reply in zip(group, read, strict=True) if client in sent}
    return replies


def read_groups(frame: Bytes, reply_to: str, size: int) -> tuple[list[list[ClientId]], list[memoryview]]:
    """Clients that replied together, and the message of each group."""
    header, blobs = wire.unpack(frame, HEADER_ROOM + 64 * size)
    if "error" in header:
        raise MessageError(f"its node reported: {header.get('message')}")
    if header.get("reply_to") != reply_to:
        raise MessageError(f"it replied to {header.get('reply_to')!r}, not to {reply_to!r}")
    groups = header.get("groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and group and all(type(client) is int for client in group) for group in groups
    ):
        raise MessageError("the groups of its reply are not lists of clients")
    if len(groups) != len(blobs):
        raise MessageError(f"its reply holds {len(blobs)} messages for {len(groups)} groups of clients")
    return groups, blobs


def _read_group(
    exchange: Exchange,
    group: list[ClientId],
    all_sent: dict[ClientId, Tree],
    message: Bytes,
    earlier: list[str | None],
    manifest: Manifest,
    limits: UpdateLimits,
) -> list[Reply]:
    """The replies of clients that share one message. `earlier` has the rejections that are certain already."""
    if all(earlier):
        return list(map(Reply, earlier))
    sent = [all_sent[client] for client in group]
    expected = _expected(exchange, sent)
    _check_size(message, expected)
    update_S, report_S = wire.decode_reply(message)
    found = update_rejections(update_S, expected, sent, limits)
    found = report_rejections(report_S, exchange.report_type._fields, found, limits)
    reasons = [first or second for first, second in zip(earlier, found, strict=True)]
    if all(reasons):
        return [Reply(shown_reason(reason)) for reason in reasons if reason]
    updates = trees.unstack(trees.from_named(exchange.update_type, update_S), len(group))
    reports = trees.unstack(trees.from_named(exchange.report_type, report_S), len(group))
    if exchange.rejection is not accept:
        reasons = [
            reason or _own_rejection(exchange, update, broadcast)
            for reason, update, broadcast in zip(reasons, updates, sent, strict=True)
        ]
    accepted = [place for place, reason in enumerate(reasons) if not reason]
    clients = [group[place] for place in accepted]
    manifest.count_up(exchange.name, exchange.update_type, clients, accepted, update_S, report_S)
    return [
        Reply(shown_reason(reason)) if reason else Reply(None, update, report)
        for reason, update, report in zip(reasons, updates, reports, strict=True)
    ]


def _expected(exchange: Exchange, sent: Sequence[Tree]) -> list[Tree]:
    """What each update should look like; clients that were sent the same share one."""
    known: dict[int, Tree] = {}
    for broadcast in sent:
        if id(broadcast) not in known:
            known[id(broadcast)] = exchange.update_like(broadcast)
    return [known[id(broadcast)] for broadcast in sent]


def _check_size(message: Bytes, expected: Sequence[Tree]) -> None:
    """Before any of it is read: to read a long header takes many times its size in memory."""
    leaves = trees.leaves(expected[0])
    most = 2 * len(expected) * sum(leaf.nbytes for leaf in leaves) + 1024 * len(leaves) + MESSAGE_ROOM
    if len(message) > most:
        raise MessageError(f"its message is {len(message)} bytes long, far more than what it was asked for")


def _own_rejection(exchange: Exchange, update: Tree, broadcast: Tree) -> str | None:
    """The algorithm's own reason. Its check may stumble on values that it did not think of."""
    try:
        return exchange.rejection(update, broadcast)
    except Exception as error:
        return shown_reason(error)


def shown_reason(problem: str | Exception) -> str:
    """Short and printable, whoever wrote it: it goes to the terminal, the manifest and the report."""
    text = str(problem) if isinstance(problem, str | FedmoeError) else f"{type(problem).__name__}: {problem}"
    short = text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"
    return "".join(letter if letter.isprintable() else "?" for letter in short)


def reported_error(frame: Bytes) -> FedmoeError | None:
    """The error in the frame of a worker that we started ourselves, to be raised here; None for any other frame."""
    try:
        header, _ = wire.unpack(frame)
    except MessageError:
        return None
    kind, message = header.get("error"), header.get("message")
    return ERRORS.get(kind, RunError)(message) if isinstance(kind, str) and isinstance(message, str) else None


def read_header(frame: Bytes, **fields: type[Any]) -> dict[str, Any]:
    """The header of a worker's reply, with these fields of these types: `read_header(frame, clients=list)`."""
    header, _ = wire.unpack(frame)
    for name, kind in fields.items():
        if type(header.get(name)) is not kind:
            raise MessageError(
                f"the {name} of a reply are {shown_reason(repr(header.get(name)))}, not a {kind.__name__}."
            )
    return header


def sort_replies(
    exchange: Exchange,
    round_number: int,
    replies: dict[ClientId, Reply],
    sent: dict[ClientId, Tree],
    manifest: Manifest,
) -> Replies:
    """What was accepted goes on, what was not is written down, in the order of clients."""
    sorted_replies = Replies({}, {}, {}, {})
    for client in sorted(replies):
        rejection, update, report = replies[client]
        if rejection is not None:
            manifest.reject(round_number, exchange.name, client, rejection)
            sorted_replies.rejected[client] = rejection
            continue
        sorted_replies.updates[client], sorted_replies.reports[client] = update, report
        sorted_replies.sent[client] = sent[client]
    return sorted_replies
