"""What left the clients: which named tensors, in which exchange, how often, how many bytes, and who sent.

Experts that a message holds side by side are counted one by one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from fedmoe.core_types import ClientId, Tensors
from fedmoe.wire import by_expert

Sent = dict[str, dict[str, int]]  # bytes by exchange and client


class Manifest:
    """Counters that survive a stop, so that a resumed run counts nothing twice.

    A checkpoint carries the counters per tensor. Those per client grow with everyone who ever sent, so they are not
    written again each round but replayed from the rounds on record.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.sent: dict[str, dict[str, dict[str, Any]]] = (saved or {}).get("sent_by_clients", {})
        self.received: dict[str, dict[str, dict[str, Any]]] = (saved or {}).get("received_by_clients", {})
        self.clients: dict[str, dict[str, dict[str, int]]] = (saved or {}).get("messages_of_client", {})
        self.refused: list[dict[str, Any]] = (saved or {}).get("refused", [])
        self._of_this_round: Sent = {}

    def count_up(
        self, exchange: str, clients: Sequence[ClientId], places: Sequence[int], update_S: Tensors, report_S: Tensors
    ) -> None:
        """The messages of some clients of a group, at their places in it."""
        if "expert_ids" in update_S and len(clients) > 1:  # they may hold different experts
            for client, place in zip(clients, places, strict=True):
                self.count_up(exchange, [client], [place], update_S, report_S)
            return
        if not clients:
            return
        update, report = ({name: leaf[places[0]] for name, leaf in part.items()} for part in (update_S, report_S))
        self._count(self.sent, exchange, update, len(clients))
        self._count(self.sent, exchange, {f"report:{name}": tensor for name, tensor in report.items()}, len(clients))
        size = sum(tensor.nbytes for tensor in (*update.values(), *report.values()))
        of_this_round = self._of_this_round.setdefault(exchange, {})
        for client in clients:
            self._count_client(exchange, str(client), size)
            of_this_round[str(client)] = size

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
        own = self.clients.setdefault(client, {}).setdefault(exchange, {"messages": 0, "bytes": 0})
        own["messages"] += 1
        own["bytes"] += size

    def count_down(self, exchange: str, broadcast: Tensors, times: int) -> None:
        self._count(self.received, exchange, broadcast, times)

    def refuse(self, round_number: int, exchange: str, client: ClientId, reason: str) -> None:
        self.refused.append({"round": round_number, "exchange": exchange, "client": client, "reason": reason})

    def for_checkpoint(self) -> dict[str, Any]:
        sent, received = _by_name(self.sent), _by_name(self.received)
        return {"sent_by_clients": sent, "received_by_clients": received, "refused": self.refused}

    def as_dict(self, silent: Iterable[ClientId] = ()) -> dict[str, Any]:
        """`silent` are the clients that opted out: named, so that the manifest can be checked against them."""
        return {
            "sent_by_clients": _by_name(self.sent),
            "received_by_clients": _by_name(self.received),
            "messages_of_client": {key: self.clients[key] for key in sorted(self.clients, key=int)},
            "opted_out_clients": [int(client) for client in silent],
            "refused": self.refused,
        }

    def totals(self) -> dict[str, int]:
        def total(table: dict[str, dict[str, dict[str, Any]]]) -> int:
            return sum(row["bytes"] for rows in table.values() for row in rows.values())

        return {
            "bytes_up": total(self.sent),
            "bytes_down": total(self.received),
            "clients_that_sent": len(self.clients),
            "refused": len(self.refused),
        }

    @staticmethod
    def _count(table: dict[str, dict[str, dict[str, Any]]], exchange: str, tensors: Tensors, times: int) -> None:
        rows = table.setdefault(exchange, {})
        for name, tensor in sorted(by_expert(tensors).items()):
            row = rows.setdefault(name, {"dtype": str(tensor.dtype).removeprefix("torch."), "times": 0, "bytes": 0})
            row["shape"] = max(row.get("shape", []), list(tensor.shape))  # whoever comes last
            row["times"] += times
            row["bytes"] += tensor.nbytes * times


def _by_name(table: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """In an order that does not tell who answered first."""
    return {exchange: dict(sorted(rows.items())) for exchange, rows in table.items()}
