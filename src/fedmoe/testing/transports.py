"""Transports around another one: they keep what passes, or change it on its way."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from safetensors.torch import save

from fedmoe import wire
from fedmoe.core_types import ClientId, Tensors
from fedmoe.encoding import Bytes, Parts
from fedmoe.engines.protocol import Transport
from fedmoe.evaluation.personal_model import PersonalModel


class Sent(NamedTuple):
    """A frame that a worker sent, and the header of the one that it replies to."""

    asked: dict[str, Any]
    frame: bytes

    @property
    def messages(self) -> dict[ClientId, list[Tensors]]:
        """[update, report] by client, for the reply to an exchange."""
        return {client: list(pair) for client, pair in messages_in(self.frame).items()}


def messages_in(reply: Bytes) -> dict[ClientId, tuple[Tensors, Tensors]]:
    """(update, report) by client, for the reply to an exchange."""
    header, blobs = wire.unpack(reply)
    found = {}
    for group, blob in zip(header["groups"], blobs, strict=True):
        update_S, report_S = wire.decode_reply(blob)
        for s, client in enumerate(group):
            found[client] = ({n: t[s] for n, t in update_S.items()}, {n: t[s] for n, t in report_S.items()})
    return found


def with_updates(reply: Bytes, clients: Sequence[ClientId], change: Callable[[Tensors], Tensors | bytes]) -> Bytes:
    """The same reply with other updates of some clients, each client for itself."""
    groups: list[list[ClientId]] = []
    blobs: list[Parts] = []
    header, _ = wire.unpack(reply)
    for client, (update, report) in messages_in(reply).items():
        changed = change(update) if client in clients else update
        groups.append([client])
        blobs.append([changed if isinstance(changed, bytes) else alone(changed, report)])
    return wire.pack({**header, "groups": groups}, blobs)


def alone(update: Tensors, report: Tensors) -> bytes:
    named = {f"update/{name}": t for name, t in update.items()} | {f"report/{name}": t for name, t in report.items()}
    return save({name: tensor[None].contiguous() for name, tensor in named.items()})


class Around:
    """A transport around another one."""

    trusted = True
    one_store = True

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        yield from self.inner.run(frames)

    def personal_model(self, *arguments: Any) -> PersonalModel:
        return self.inner.personal_model(*arguments)


class Spy(Around):
    """A transport that keeps what workers send and what they are sent."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent: list[Sent] = []
        self.received: list[Bytes] = []

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        self.received += frames
        for index, reply in self.inner.run(frames):
            self.sent.append(Sent(wire.unpack(frames[index])[0], bytes(reply)))
            yield index, reply

    @property
    def exchanged(self) -> list[Sent]:
        return [one for one in self.sent if one.asked["do"] == "exchange"]


class Backwards(Around):
    """A transport whose replies arrive in the opposite order."""

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        last = len(frames) - 1
        yield from ((last - index, reply) for index, reply in self.inner.run(frames[::-1]))


class Tamper(Around):
    """A transport on whose way one client's updates of the rounds are changed."""

    def __init__(self, inner: Transport, client: ClientId, change: Callable[[Tensors], Tensors]) -> None:
        super().__init__(inner)
        self.client, self.change = client, change

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            is_update = asked.get("phase") == "round"
            yield index, with_updates(reply, [self.client], self.change) if is_update else reply
