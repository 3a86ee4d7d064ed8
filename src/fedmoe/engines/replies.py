"""What clients answered: read, checked, counted, and sorted into what goes on and what is rejected."""

from typing import Any, NamedTuple

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Exchange, accept
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.update_checks import rejections_in_reports, rejections_in_updates
from fedmoe.errors import MessageError


class Reply(NamedTuple):
    """One client's update and report, or why they are rejected."""

    rejection: str | None
    update: Any = None
    report: Any = None


class Replies(NamedTuple):
    """What `aggregate` is given, by client id; and who was rejected."""

    updates: dict[ClientId, Any]
    reports: dict[ClientId, Any]
    sent: dict[ClientId, Any]
    rejected: dict[ClientId, str]


def read_answer(
    exchange: Exchange,
    sent: list[Tree],
    group: list[ClientId],
    message: Bytes,
    manifest: Manifest,
    max_norm: float | None,
) -> dict[ClientId, Reply]:
    """The messages of clients that answered together, each with the reason why it is rejected, if it is."""
    try:
        tensors_S, numbers_S = wire.decode_answer(message)
        rejections = rejections_in_updates(tensors_S, exchange.update_like(sent[0]), sent, max_norm)
        rejections = rejections_in_reports(numbers_S, exchange.report_type._fields, rejections)
        if all(rejections):
            return dict(zip(group, map(Reply, rejections), strict=True))
        updates = trees.unstack(trees.from_named(exchange.update_type, tensors_S), len(group))
        reports = trees.unstack(trees.from_named(exchange.report_type, numbers_S), len(group))
    except MessageError as error:
        return {client: Reply(str(error)) for client in group}
    if exchange.rejection is not accept:
        asked = zip(rejections, updates, sent, strict=True)
        rejections = [rejection or exchange.rejection(one, broadcast) for rejection, one, broadcast in asked]
    accepted = [place for place, rejection in enumerate(rejections) if not rejection]
    manifest.count_up(exchange.name, [group[s] for s in accepted], accepted, tensors_S, numbers_S)
    return dict(zip(group, map(Reply, rejections, updates, reports), strict=True))


def sort_replies(
    exchange: Exchange,
    round_number: int,
    replies_read: dict[ClientId, Reply],
    sent: dict[ClientId, Tree],
    manifest: Manifest,
) -> Replies:
    """What was accepted goes on, what was not is written down, in the order of clients."""
    replies = Replies({}, {}, {}, {})
    for client in sorted(replies_read):
        rejection, update, report = replies_read[client]
        if rejection:
            manifest.reject(round_number, exchange.name, client, rejection)
            replies.rejected[client] = rejection
            continue
        replies.updates[client], replies.reports[client] = update, report
        replies.sent[client] = sent[client]
    return replies


class UpdateLimits(NamedTuple):
    max_norm: float | None = None


def read_replies(exchange, cohort, reply_to, frame, manifest, limits):  # type: ignore
    header, blobs = wire.unpack(frame)
    out = {}
    by = dict(zip(cohort.clients, cohort.broadcasts))
    for group, blob in zip(header["groups"], blobs, strict=True):
        out |= read_answer(exchange, [by[c] for c in group], group, blob, manifest, limits.max_norm)
    return out


def reported_error(frame):  # type: ignore
    from fedmoe.errors import ConfigError, DataError, MessageError, RunError

    header, _ = wire.unpack(frame)
    kinds = {k.__name__: k for k in (ConfigError, DataError, MessageError, RunError)}
    return kinds[header["error"]](header["message"]) if "error" in header else None


def read_header(frame):  # type: ignore
    return wire.unpack(frame)[0]


def read_scores(cohort, reply_to, frame, manifest, num_clients):  # type: ignore
    from fedmoe.evaluation.score_message import ScoreMessage, scores_in

    header, blobs = wire.unpack(frame)
    return [
        s
        for (c,), b in zip(header["groups"], blobs, strict=True)
        for s in scores_in(wire.decode(ScoreMessage, b), c, unseen=c >= num_clients)
    ]
