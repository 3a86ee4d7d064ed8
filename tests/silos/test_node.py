"""A node's own rules, whatever a server asks for."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmoe import assembly
from fedmoe.engines.flower.grid import GridTransport
from fedmoe.engines.session import Session
from fedmoe.framing import Bytes, pack, unpack
from fedmoe.silos.node import Agreement, SiloNode
from fedmoe.silos.silo_data import server_federation
from silos.apps import CLIENTS, client_rows, silo_config

RUN = "0" * 32
SENDS_NOTHING = Agreement()


class Nodes:
    """A transport to nodes in this process, without Flower between."""

    trusted = False
    one_store = False
    personal_model = GridTransport.personal_model

    def __init__(self, nodes: dict[int, SiloNode], attempt: int = 1) -> None:
        self.nodes, self.envelope = nodes, {"run": RUN, "attempt": attempt}
        self.frames: list[Bytes] = []
        self.replies: list[Bytes] = []

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        for index, frame in enumerate(frames):
            (client,) = unpack(frame)[0]["clients"]
            self.frames.append(frame)
            if client in self.nodes:
                self.replies.append(self.nodes[client].handle(self.envelope, frame))
                yield index, self.replies[-1]


def open_nodes(folder: Path, agreement: Agreement = SENDS_NOTHING, algorithm: str = "fedrep") -> dict[int, SiloNode]:
    config = silo_config(algorithm)
    return {n: SiloNode(config, n, client_rows(n), folder / str(n), agreement) for n in range(CLIENTS)}


def session_of(transport: Nodes, algorithm: str = "fedrep") -> Session:
    config = silo_config(algorithm)
    return Session(assembly.build(config, federation=server_federation(config)), transport)


def train(session: Session) -> None:
    while not session.is_trained:
        assert not session.next_round().abandoned
        session.drop_superseded(session.step)


def error_of(frame: Bytes) -> str:
    return str(unpack(frame)[0].get("message"))


def test_a_whole_run_whose_states_and_models_stay_on_the_nodes(tmp_path: Path) -> None:
    nodes = Nodes(open_nodes(tmp_path))
    session = session_of(nodes)
    train(session)
    session.deliver(range(CLIENTS))
    assert [client for clients in session.personalize() for client in clients] == [0, 1, 2]
    assert [client for clients in session.leave_models() for client in clients] == [0, 1, 2]
    assert session.missing_states([]) == []
    model = tmp_path / "1" / "runs" / RUN / "model.pt2"
    assert model.stat().st_mode & 0o777 == 0o600
    probabilities = torch.export.load(model).module()(client_rows(1)[0][:5])
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5))
    personalised_again = len(nodes.frames)
    assert sorted(client for clients in session.personalize() for client in clients) == [0, 1, 2]
    assert all(unpack(frame)[0]["do"] == "personalized" for frame in nodes.frames[personalised_again:])


def test_superseded_states_are_dropped_with_the_next_work(tmp_path: Path) -> None:
    nodes = Nodes(open_nodes(tmp_path))
    train(session_of(nodes))
    assert any(unpack(frame)[0].get("superseded") for frame in nodes.frames)
    with closing(sqlite3.connect(tmp_path / "0" / "runs" / RUN / "private.sqlite")) as db:
        versions = [row[0] for row in db.execute("SELECT DISTINCT version FROM state WHERE client = 0")]
    assert len(versions) <= 2


def test_a_duplicated_message_changes_no_state_and_gets_the_same_reply(tmp_path: Path) -> None:
    nodes = Nodes(open_nodes(tmp_path))
    session_of(nodes).next_round()
    frame, reply = nodes.frames[0], nodes.replies[0]
    assert nodes.nodes[0].handle(nodes.envelope, frame) == reply
    again = open_nodes(tmp_path)[0]  # as after a restart
    assert again.handle(nodes.envelope, frame) == reply
    assert "came too late" not in error_of(again.handle({"run": RUN, "attempt": 2}, frame))
    assert "attempt 1 at this run came too late" in error_of(again.handle(nodes.envelope, frame))


def test_no_private_tensor_and_no_opted_out_record_is_in_what_a_node_sends(tmp_path: Path) -> None:
    """Byte search, and the bytes of two runs that differ in opted-out records alone."""
    config = silo_config()

    def run(folder: str, extra: float) -> tuple[list[Bytes], Path]:
        nodes = {}
        for client in range(CLIENTS):
            x, y = client_rows(client)
            out = torch.arange(len(y)) < 5
            data = {"train": (torch.where(out[:, None], x + extra, x), y), "opted_out": out}
            nodes[client] = SiloNode(config, client, data, tmp_path / folder / str(client), Agreement())
        transport = Nodes(nodes)
        train(session_of(transport))
        return transport.replies, tmp_path / folder / "0" / "runs" / RUN / "private.sqlite"

    (first, store), (second, _) = run("first", 0.0), run("second", 3.0)
    assert [bytes(reply) for reply in first] == [bytes(reply) for reply in second]
    with closing(sqlite3.connect(store)) as db:
        states = [row[0] for row in db.execute("SELECT tensors FROM state WHERE client = 0")]
    assert states
    for state in states:
        tensors = state[8 + int.from_bytes(state[:8], "little") :]
        assert not any(tensors[:32] in bytes(reply) for reply in first)


def test_scores_leave_only_where_config_and_node_agree(tmp_path: Path) -> None:
    for agreement, expected in ((Agreement(), 0), (Agreement(scores=True), CLIENTS)):
        nodes = Nodes(open_nodes(tmp_path / str(expected), agreement))
        session = session_of(nodes)
        train(session)
        session.deliver(range(CLIENTS))
        list(session.personalize())
        scores = [score for batch in session.score() for score in batch]
        assert len({score.client for score in scores}) == expected
        refused = [row for row in session.manifest.rejected if "do not send scores" in row["reason"]]
        assert len(refused) == CLIENTS - expected


@pytest.mark.parametrize(
    ("envelope", "header", "sentence"),
    [
        ({"run": "../../etc", "attempt": 1}, {"do": "score", "clients": [0]}, "names no run"),
        ({"run": RUN, "attempt": "1"}, {"do": "score", "clients": [0]}, "names no run"),
        ({}, {"do": "score", "clients": [0]}, "names no run"),
        ({"run": RUN, "attempt": 1}, {"do": "score", "clients": [1]}, "this node serves 0"),
        ({"run": RUN, "attempt": 1}, {"do": "drop", "clients": [0], "states": [[1, 0, 9]]}, "this node serves 0"),
        ({"run": RUN, "attempt": 1}, {"do": "drop", "clients": [0], "states": 3}, "TypeError"),
        ({"run": RUN, "attempt": 1}, {"do": "explode", "clients": [0]}, "explode"),
    ],
)
def test_what_is_not_for_this_node_is_refused_in_words(
    envelope: dict[str, Any], header: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    node = open_nodes(tmp_path)[0]
    assert sentence in error_of(node.handle(envelope, pack(header)))
    assert "not a frame" in error_of(node.handle({"run": RUN, "attempt": 1}, b"noise"))


def test_a_broadcast_of_other_shapes_is_an_error_in_words(tmp_path: Path) -> None:
    nodes = Nodes(open_nodes(tmp_path))
    session_of(nodes).next_round()
    other = assembly.build(
        silo_config().model_copy(update={"model": silo_config().model.model_copy(update={"hidden": (7,)})}),
        federation=server_federation(silo_config()),
    )
    wrong = Nodes({})
    Session(other, wrong).next_round()
    for frame in wrong.frames[:1]:
        assert error_of(nodes.nodes[0].handle({"run": RUN, "attempt": 2}, frame)) not in ("None", "")
