"""What left the clients: which named tensors, in which exchange, how often, how many bytes, and who sent.

Experts that a message holds side by side are counted one by one. Scores have sections of their own: they are no part of
training, and no part of its totals.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedmoe import trees
from fedmoe.core_types import ClientId, Tensors, Tree
from fedmoe.wire import by_expert, expert_fields

log = logging.getLogger("fedmoe")

Sent = dict[str, dict[str, int]]  # bytes by exchange and client
TensorCounts = dict[str, dict[str, Any]]  # by name: dtype, shape, times, bytes


class Manifest:
    """Counters that survive a stop, so that a resumed run counts nothing twice.

    A checkpoint carries the counters per tensor. Those per client grow with everyone who ever sent, so they are not
    written again each round but replayed from the rounds on record.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.sent: dict[str, TensorCounts] = saved.get("sent_by_clients", {})
        self.received: dict[str, TensorCounts] = saved.get("received_by_clients", {})
        self.clients: dict[str, dict[str, dict[str, int]]] = saved.get("messages_of_client", {})
        self.rejected: list[dict[str, Any]] = saved.get("rejected", [])
        self.scores: TensorCounts = saved.get("scores_sent_by_clients", {})
        self.score_clients: dict[str, dict[str, int]] = saved.get("score_messages_of_client", {})
        self._of_this_round: Sent = {}

    def count_up(
        self,
        exchange: str,
        update_type: type[Any],
        clients: Sequence[ClientId],
        places: Sequence[int],
        update_S: Tensors,
        report_S: Tensors,
    ) -> None:
        """The accepted messages of some clients of a group, at their places in it."""
        if expert_fields(update_type) and len(clients) > 1:  # they may hold different experts
            for client, place in zip(clients, places, strict=True):
                self.count_up(exchange, update_type, [client], [place], update_S, report_S)
            return
        if not clients:
            return
        update, report = ({name: leaf[places[0]] for name, leaf in part.items()} for part in (update_S, report_S))
        named = by_expert(update_type, update) | {f"report:{name}": tensor for name, tensor in report.items()}
        _count(self.sent.setdefault(exchange, {}), named, len(clients))
        size = _bytes_of(update) + _bytes_of(report)
        of_this_round = self._of_this_round.setdefault(exchange, {})
        for client in clients:
            self._count_client(exchange, str(client), size)
            of_this_round[str(client)] = size

    def count_down(self, exchange: str, broadcast: Tree, times: int) -> None:
        named = by_expert(type(broadcast), trees.to_named(broadcast))
        _count(self.received.setdefault(exchange, {}), named, times)

    def count_scores(self, client: ClientId, scores: Tensors) -> None:
        """What a client sent to be judged by, not to train with: counted apart."""
        _count(self.scores, scores, 1)
        _count_message(self.score_clients.setdefault(str(client), {}), _bytes_of(scores))

    def reject(self, round_number: int, exchange: str, client: ClientId, reason: str) -> None:
        """Of a client that did not reply, too. Whoever watches a server reads it in the log."""
        log.info("round %d, %s: client %d is rejected: %s", round_number, exchange, client, reason)
        self.rejected.append({"round": round_number, "exchange": exchange, "client": client, "reason": reason})

    def take_round(self) -> Sent:
        """Who sent how much since the last call: what a round puts on record."""
        taken, self._of_this_round = self._of_this_round, {}
        return {exchange: dict(sorted(sizes.items(), key=lambda one: int(one[0]))) for exchange, sizes in taken.items()}

    def replay(self, rounds: Iterable[Sent]) -> None:
        for sent in rounds:
            for exchange, sizes in sent.items():
                for client, size in sizes.items():
                    self._count_client(exchange, client, size)

    def _count_client(self, exchange: str, client: str, size: int) -> None:
        _count_message(self.clients.setdefault(client, {}).setdefault(exchange, {}), size)

    def for_checkpoint(self) -> dict[str, Any]:
        return {
            "sent_by_clients": _by_name(self.sent),
            "received_by_clients": _by_name(self.received),
            "rejected": self.rejected,
            "scores_sent_by_clients": dict(sorted(self.scores.items())),
            "score_messages_of_client": _by_number(self.score_clients),
        }

    def as_dict(
        self, opted_out: Iterable[ClientId] = (), names: Mapping[ClientId, str] | None = None
    ) -> dict[str, Any]:
        """`opted_out` are named, so that the manifest can be checked against them; `names` are those of the clients."""
        return self.for_checkpoint() | {
            "messages_of_client": _by_number(self.clients),
            "opted_out_clients": [int(client) for client in opted_out],
            "client_names": {str(client): name for client, name in sorted((names or {}).items())},
        }

    def totals(self) -> dict[str, int]:
        def total(tables: Iterable[TensorCounts]) -> int:
            return sum(row["bytes"] for rows in tables for row in rows.values())

        return {
            "bytes_up": total(self.sent.values()),
            "bytes_down": total(self.received.values()),
            "clients_that_sent": len(self.clients),
            "rejected": len(self.rejected),
            "score_bytes": total([self.scores]),
        }


def _count(rows: TensorCounts, named: Tensors, times: int) -> None:
    for name, tensor in sorted(named.items()):
        row = rows.setdefault(name, {"dtype": str(tensor.dtype).removeprefix("torch."), "times": 0, "bytes": 0})
        row["shape"] = max(row.get("shape", []), list(tensor.shape))  # whoever comes last
        row["times"] += times
        row["bytes"] += tensor.nbytes * times


def _count_message(row: dict[str, int], size: int) -> None:
    row["messages"] = row.get("messages", 0) + 1
    row["bytes"] = row.get("bytes", 0) + size


def _bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _by_name(table: dict[str, TensorCounts]) -> dict[str, TensorCounts]:
    """In an order that does not show who replied first."""
    return {exchange: dict(sorted(rows.items())) for exchange, rows in table.items()}


def _by_number(table: dict[str, Any]) -> dict[str, Any]:
    return {client: table[client] for client in sorted(table, key=int)}
