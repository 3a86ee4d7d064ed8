"""What left the clients: which named tensors, in which exchange, how often, how many bytes, and who sent."""

from collections.abc import Iterable
from typing import Any

from fedmoe.vocabulary import ClientId, Tensors


class Manifest:
    """Counters that a checkpoint carries, so that a resumed run counts nothing twice."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.sent: dict[str, dict[str, dict[str, Any]]] = (saved or {}).get("sent_by_clients", {})
        self.received: dict[str, dict[str, dict[str, Any]]] = (saved or {}).get("received_by_clients", {})
        self.clients: dict[str, dict[str, dict[str, int]]] = (saved or {}).get("messages_of_client", {})
        self.refused: list[dict[str, Any]] = (saved or {}).get("refused", [])

    def count_up(self, exchange: str, client: ClientId, update: Tensors, report: Tensors) -> None:
        self._count(self.sent, exchange, update, 1)
        self._count(self.sent, exchange, {f"report:{name}": tensor for name, tensor in report.items()}, 1)
        own = self.clients.setdefault(str(client), {}).setdefault(exchange, {"messages": 0, "bytes": 0})
        own["messages"] += 1
        own["bytes"] += sum(tensor.nbytes for tensor in (*update.values(), *report.values()))

    def count_down(self, exchange: str, broadcast: Tensors, times: int) -> None:
        self._count(self.received, exchange, broadcast, times)

    def refuse(self, round_number: int, exchange: str, client: ClientId, reason: str) -> None:
        self.refused.append({"round": round_number, "exchange": exchange, "client": client, "reason": reason})

    def as_dict(self, silent: Iterable[ClientId] = ()) -> dict[str, Any]:
        """`silent` are the clients that opted out: named, so that the manifest can be checked against them."""
        return {
            "sent_by_clients": self.sent,
            "received_by_clients": self.received,
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
        for name, tensor in sorted(tensors.items()):
            row = rows.setdefault(name, {"dtype": str(tensor.dtype).removeprefix("torch."), "times": 0, "bytes": 0})
            row["shape"] = list(tensor.shape)
            row["times"] += times
            row["bytes"] += tensor.nbytes * times
