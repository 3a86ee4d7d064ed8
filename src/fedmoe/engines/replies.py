"""What clients answered: read, checked, counted, and sorted into what goes on and what is refused."""

from typing import Any, NamedTuple

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Exchange, accept
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.update_checks import faults_in_reports, faults_in_updates
from fedmoe.errors import MessageError


class Reply(NamedTuple):
    """One client's update and report, or why they are refused."""

    fault: str | None
    update: Any = None
    report: Any = None


class Replies(NamedTuple):
    """What `aggregate` is given, by client id; and who was refused."""

    updates: dict[ClientId, Any]
    reports: dict[ClientId, Any]
    sent: dict[ClientId, Any]
    refused: set[ClientId]


def read_answer(
    exchange: Exchange,
    sent: list[Tree],
    group: list[ClientId],
    message: Bytes,
    manifest: Manifest,
    max_norm: float | None,
) -> dict[ClientId, Reply]:
    """The messages of clients that answered together, each with the reason why it is refused, if it is."""
    try:
        tensors_S, numbers_S = wire.decode_answer(message)
        faults = faults_in_updates(tensors_S, exchange.update_like(sent[0]), sent, max_norm)
        faults = faults_in_reports(numbers_S, exchange.report_type._fields, faults)
        if all(faults):
            return dict(zip(group, map(Reply, faults), strict=True))
        updates = trees.unstack(trees.from_named(exchange.update_type, tensors_S), len(group))
        reports = trees.unstack(trees.from_named(exchange.report_type, numbers_S), len(group))
    except MessageError as error:
        return {client: Reply(str(error)) for client in group}
    if exchange.rejection is not accept:
        asked = zip(faults, updates, sent, strict=True)
        faults = [fault or exchange.rejection(one, broadcast) for fault, one, broadcast in asked]
    accepted = [place for place, fault in enumerate(faults) if not fault]
    manifest.count_up(exchange.name, [group[s] for s in accepted], accepted, tensors_S, numbers_S)
    return dict(zip(group, map(Reply, faults, updates, reports), strict=True))


def sort_replies(
    exchange: Exchange,
    round_number: int,
    told: dict[ClientId, Reply],
    sent: dict[ClientId, Tree],
    manifest: Manifest,
) -> Replies:
    """What was accepted goes on, what was not is written down, in the order of clients."""
    replies = Replies({}, {}, {}, set())
    for client in sorted(told):
        fault, update, report = told[client]
        if fault:
            manifest.refuse(round_number, exchange.name, client, fault)
            replies.refused.add(client)
            continue
        replies.updates[client], replies.reports[client] = update, report
        replies.sent[client] = sent[client]
    return replies
