"""The server's side of the Flower engine: which node serves which client, and the transport to them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, Self

from fedmoe.core_types import ClientId, Tree
from fedmoe.engines.flower.post import Letter, Post, error_frame
from fedmoe.engines.replies import read_header, reported_error
from fedmoe.errors import MessageError, RunError
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.framing import Bytes, pack, unpack

HELLO_SECONDS = 300.0  # for the first answer of a node: its worker imports torch and reads the client's data
AGAIN_SECONDS = 60.0  # for one that has answered before
LOOK_SECONDS = 1.0  # between two looks at which nodes are there, where too few are
HELLO = pack({"do": "hello"})


class Nodes:
    """Who is where. A node says itself which client it serves, when it is first met."""

    def __init__(self, post: Post, num_clients: int, hello_seconds: float = HELLO_SECONDS) -> None:
        self._post, self.num_clients, self._hello_seconds = post, num_clients, hello_seconds
        self.node_of: dict[ClientId, int] = {}
        self.obstacles: dict[int, str] = {}  # by node: why it cannot take part
        self._met: set[int] = set()
        self._asked: dict[str, tuple[Letter, float]] = {}  # who has not answered yet: by the letter's name, until when

    def look(self) -> dict[ClientId, int]:
        """The nodes that are connected now, by the client that they serve. Waits for nobody's answer."""
        connected = set(self._post.grid.get_node_ids())
        self._met &= connected  # who comes back is asked again: it may have been repaired, or moved
        now = time.monotonic()
        self._asked = {
            name: (letter, until)
            for name, (letter, until) in self._asked.items()
            if letter.node in connected and now < until
        }
        asked = {letter.node for letter, _ in self._asked.values()}
        for node in sorted(connected - self._met - asked):
            letter = Letter(node, HELLO)
            if name := self._post.push(letter, self._hello_seconds):
                self._asked[name] = letter, now + self._hello_seconds
        letters = {name: letter for name, (letter, _) in self._asked.items()}
        for name, frame in sorted(self._post.pull(letters, letters), key=lambda one: letters[one[0]].node):
            del self._asked[name]
            self._meet(letters[name].node, frame)
        return {client: node for client, node in self.node_of.items() if node in connected}

    def _meet(self, node: int, frame: Bytes) -> None:
        self._met.add(node)
        self.obstacles.pop(node, None)
        client = self._introduced(node, frame)
        if client is not None:
            self._require_alone(client, node)
            self.node_of[client] = node

    def _introduced(self, node: int, frame: Bytes) -> ClientId | None:
        try:
            if error := reported_error(frame):
                raise error
            said = read_header(frame, client=int, version=str)
            if not 0 <= said["client"] < self.num_clients:
                raise MessageError(f"it serves client {said['client']}, but there are {self.num_clients}.")
            if said["version"] != version("fedmoe"):
                raise MessageError(
                    f"it has fedmoe {said['version']}, the server {version('fedmoe')}. Install the same."
                )
        except Exception as error:  # one node's trouble
            self.obstacles[node] = str(error)
            return None
        client: ClientId = said["client"]
        return client

    def _require_alone(self, client: ClientId, node: int) -> None:
        """Two nodes that claim one client would train it twice, from two private states."""
        other = self.node_of.get(client)
        if other in (None, node) or other not in self._met:
            return
        still_there = dict(self._post.send({0: Letter(other, HELLO)}, min(self._hello_seconds, AGAIN_SECONDS)))
        if still_there and reported_error(still_there[0]) is None:
            raise RunError(
                f"two nodes serve client {client}: {other} and {node}. Give each node a partition-id of its own "
                "(--node-config 'partition-id=…')."
            )


class GridTransport:
    """Frames for one client each, to its node. What is late or absent is left to the session's rules."""

    trusted = False  # what another machine reports is a reason to reject its reply
    one_store = False

    def __init__(self, post: Post, nodes: Nodes, *, min_clients: int, deadline: float, join_seconds: float) -> None:
        self._post, self._nodes = post, nodes
        self._min_clients, self._deadline, self._join_seconds = min_clients, deadline, join_seconds

    def __enter__(self) -> Self:
        """Wait for all clients' nodes, and then go on with those that are there if a round can be made of them."""
        there = self._look_until(self._nodes.num_clients, self._join_seconds)
        if len(there) < self._min_clients:
            reasons = "; ".join(f"node {node}: {why}" for node, why in sorted(self._nodes.obstacles.items()))
            raise RunError(
                f"{len(there)} nodes can take part after {self._join_seconds:g} seconds (engine.flower.join_seconds), "
                f"fewer than schedule.min_clients={self._min_clients}. {reasons or 'No other node is connected.'}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        """The grid is its owner's to close."""

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        if not frames:
            return
        begun = time.monotonic()
        clients = [_client_of(frame) for frame in frames]
        there = self._look_until(min(self._min_clients, len(frames)), self._deadline, clients)
        letters: dict[int, Letter] = {}
        for index, (client, frame) in enumerate(zip(clients, frames, strict=True)):
            if client in there:
                letters[index] = Letter(there[client], frame)
            else:
                yield index, error_frame(self._why_absent(client))
        yield from self._post.send(letters, max(1.0, self._deadline - (time.monotonic() - begun)))

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> NoReturn:
        raise RunError(
            f"the model of client {client} is on its own node and does not leave it: `fedmoe flower personalize` "
            "leaves it there as a file."
        )

    def _look_until(
        self, needed: int, seconds: float, wanted: Sequence[ClientId] | None = None
    ) -> Mapping[ClientId, int]:
        """Who of the wanted is there, once as many as needed are, or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            there = self._nodes.look()
            found = {client: node for client, node in there.items() if wanted is None or client in wanted}
            if len(found) >= needed or time.monotonic() >= deadline:
                return found
            time.sleep(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))

    def _why_absent(self, client: ClientId) -> str:
        node = self._nodes.node_of.get(client)
        return self._nodes.obstacles.get(node or 0, "it is not connected")


class SharedStoreTransport(GridTransport):
    """The same for nodes of a simulation on this machine, which share one file of private states."""

    trusted = True
    one_store = True

    def __init__(self, post: Post, nodes: Nodes, worker: Any, **limits: Any) -> None:
        super().__init__(post, nodes, **limits)
        self._worker = worker

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        """What is asked about the store of all is answered here, beside it."""
        if len(frames) == 1 and not unpack(frames[0])[0]["clients"]:
            yield 0, self._worker.handle(frames[0])
            return
        yield from super().run(frames)

    def personal_model(self, *arguments: Any) -> PersonalModel:  # type: ignore[override]
        model: PersonalModel = self._worker.personal_model(*arguments)
        return model


def _client_of(frame: Bytes) -> ClientId:
    (client,) = unpack(frame)[0]["clients"]
    number: ClientId = client
    return number
