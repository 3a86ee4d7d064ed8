"""The server's side of the Flower engine, with nodes in this process: what they may send, and who is waited for."""

import pickle
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmoe import assembly, trees
from fedmoe.engines.flower.grid import GridTransport, Nodes
from fedmoe.engines.flower.post import Letter, Post
from fedmoe.engines.flower.records import STYPE, to_frame, to_records
from fedmoe.engines.session import Session
from fedmoe.errors import MessageError, RunError
from fedmoe.framing import pack, unpack
from fedmoe.silos.node import Agreement, SiloNode
from fedmoe.silos.silo_data import server_federation
from silos.apps import CLIENTS, client_rows, silo_config

flwr = pytest.importorskip("flwr.app", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RUN = "0" * 32
Answer = Callable[[Any], Any]  # the content of a message -> that of the reply, or None


@pytest.fixture(autouse=True)
def a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower builds messages within a run only."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


class FakeGrid:
    """Answers by node id, at once."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self.answers, self.replies = answers, dict[str, Any]()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        names = []
        for message in messages:
            names.append(f"message {len(self.replies)} to {message.metadata.dst_node_id} at {time.monotonic_ns()}")
            message.metadata.__dict__["_message_id"] = names[-1]
            content = self.answers[message.metadata.dst_node_id](message.content)
            if content is not None:
                self.replies[names[-1]] = flwr.Message(content, reply_to=message)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        return [self.replies.pop(name) for name in names if name in self.replies]


def honest(node: SiloNode) -> Answer:
    def answer(content: Any) -> Any:
        frame, envelope = to_frame(content, 1 << 30)
        return to_records(node.handle(envelope, frame), envelope)

    return answer


def is_training(content: Any) -> bool:
    return unpack(to_frame(content, 1 << 30)[0])[0]["do"] == "exchange"


def changed(node: SiloNode, change: Callable[[Any], Any]) -> Answer:
    """An honest node but for its updates."""
    return lambda content: change(honest(node)(content)) if is_training(content) else honest(node)(content)


def silent(node: SiloNode) -> Answer:
    return lambda content: None if is_training(content) else honest(node)(content)


def run(folder: Path, third: Callable[[SiloNode], Answer], deadline: float = 0.5) -> Session:
    """Three rounds with two honest nodes and a third one."""
    config = silo_config()
    nodes = [SiloNode(config, n, client_rows(n), folder / str(n), Agreement()) for n in range(CLIENTS)]
    grid = FakeGrid({10: honest(nodes[0]), 11: honest(nodes[1]), 12: third(nodes[2])})
    parts = assembly.build(config, federation=server_federation(config))
    post = Post(grid, {"run": RUN, "attempt": 1})
    limits = {"min_clients": 2, "deadline": deadline, "join_seconds": 2.0}
    with GridTransport(post, Nodes(post, CLIENTS, 5.0), **limits) as transport:
        session = Session(parts, transport)
        while not session.is_trained:
            assert not session.next_round().abandoned
    return session


def first_array(content: Any) -> tuple[Any, str]:
    record = next(iter(content.array_records.values()))
    return record, next(name for name in sorted(record) if name.startswith("update/") and "num_examples" not in name)


def with_array(array: Any) -> Callable[[Any], Any]:
    def change(content: Any) -> Any:
        record, name = first_array(content)
        record[name] = array(record[name])
        return content

    return change


def filled(value: float) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        data = torch.full(old.shape, value).numpy().tobytes()
        return flwr.Array("F32", old.shape, STYPE, data)

    return with_array(change)


def many_examples(content: Any) -> Any:
    for record in content.array_records.values():
        for name in record:
            if name.endswith("num_examples"):
                old = record[name]
                kind = torch.float32 if old.dtype == "F32" else torch.int64
                record[name] = flwr.Array(
                    old.dtype, old.shape, STYPE, torch.full(old.shape, 1e9).to(kind).numpy().tobytes()
                )
    return content


def renamed(content: Any) -> Any:
    record, name = first_array(content)
    record["update/of_something_else"] = record.pop(name)
    return content


def second_record(content: Any) -> Any:
    content["another"] = flwr.ArrayRecord({"x": flwr.Array("F32", (1,), STYPE, bytes(4))})
    return content


def extra_metric(content: Any) -> Any:
    content["metrics"] = flwr.MetricRecord({"accuracy": 1.0})
    return content


def no_header(content: Any) -> Any:
    del content["header"]
    return content


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "NaN": filled(float("nan")),
    "infinity": filled(float("inf")),
    "large values": filled(1e30),
    "another shape": with_array(lambda old: flwr.Array("F32", (1, 1, 1), STYPE, bytes(4))),
    "a shape that does not fit its bytes": with_array(lambda old: flwr.Array("F32", (9, 9), STYPE, old.data)),
    "another type": with_array(lambda old: flwr.Array("F64", old.shape, STYPE, 2 * old.data)),
    "a huge tensor": with_array(lambda old: flwr.Array("F32", (1 << 25,), STYPE, bytes(1 << 27))),
    "a tensor said to be huge": with_array(lambda old: flwr.Array("F32", (1 << 60,), STYPE, old.data)),
    "a pickle": with_array(lambda old: flwr.Array("object", (1,), "pickle", pickle.dumps(print))),
    "a pickle of NumPy": with_array(lambda old: flwr.Array("object", (1,), "numpy.ndarray", pickle.dumps(print))),
    "other names": renamed,
    "a billion examples": many_examples,
    "a second record": second_record,
    "an extra metric": extra_metric,
    "no header": no_header,
    "nothing": lambda content: flwr.RecordDict(),
}


@pytest.fixture(scope="module")
def without_the_third(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    session = run(tmp_path_factory.mktemp("two"), silent)
    assert {row["client"] for row in session.manifest.rejected} == {2}
    return trees.to_bytes(session.server)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_client_is_rejected_and_the_others_go_on(name: str, tmp_path: Path, without_the_third: bytes) -> None:
    session = run(tmp_path, lambda node: changed(node, HOSTILE[name]))
    rejected = session.manifest.rejected
    assert [(row["round"], row["client"]) for row in rejected] == [(1, 2), (2, 2), (3, 2)]
    assert all(row["reason"] and row["reason"] != "it did not reply" for row in rejected)
    assert trees.to_bytes(session.server) == without_the_third


def test_a_node_that_never_says_hello_is_not_waited_for(tmp_path: Path, without_the_third: bytes) -> None:
    session = run(tmp_path, lambda node: lambda content: None)
    assert {row["reason"] for row in session.manifest.rejected} == {"its node reported: it is not connected"}
    assert trees.to_bytes(session.server) == without_the_third


def test_all_rounds_end_with_a_third_of_the_replies_lost_at_random(tmp_path: Path) -> None:
    config = silo_config()
    schedule = config.schedule.model_copy(update={"rounds": 12, "min_clients": 2})
    config = config.model_copy(update={"schedule": schedule})
    draw = random.Random(0)

    def unreliable(node: SiloNode) -> Answer:
        return lambda content: None if is_training(content) and draw.random() < 0.3 else honest(node)(content)

    nodes = [SiloNode(config, n, client_rows(n), tmp_path / str(n), Agreement()) for n in range(CLIENTS)]
    post = Post(FakeGrid({n: unreliable(node) for n, node in enumerate(nodes)}), {"run": RUN, "attempt": 1})
    with GridTransport(post, Nodes(post, CLIENTS), min_clients=2, deadline=0.3, join_seconds=5.0) as transport:
        session = Session(assembly.build(config, federation=server_federation(config)), transport)
        records = [session.next_round() for _ in range(12)]
    assert session.is_trained and sum(record.rejected for record in records) >= 5
    assert not all(record.abandoned for record in records)
    assert max(record.seconds for record in records) < 30


def test_frames_are_the_same_after_their_way_through_records() -> None:
    from fedmoe import encoding

    tensors = {"a/b": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3), "flags": torch.tensor([True, False])}
    frame = pack({"do": "exchange", "clients": [3]}, [encoding.encode_tensors(tensors), encoding.encode_tensors({})])
    back, envelope = to_frame(to_records(frame, {"run": RUN}), 1 << 20)
    assert bytes(back) == bytes(frame) and envelope == {"run": RUN}
    with pytest.raises(MessageError, match="holds 34 bytes, and at most 10 are read"):
        to_frame(to_records(frame, {}), 10)


def hello(client: Any, version: str | None = None) -> Answer:
    from importlib.metadata import version as installed

    return lambda content: to_records(pack({"client": client, "version": version or installed("fedmoe")}), {})


def test_two_nodes_that_serve_one_client_end_the_run() -> None:
    post = Post(FakeGrid({10: hello(0), 11: hello(0)}), {})
    with pytest.raises(RunError, match=r"two nodes serve client 0: 10 and 11. Give each node a partition-id"):
        Nodes(post, CLIENTS, 1.0).look()


def test_a_node_that_took_the_place_of_a_lost_one_serves_its_client() -> None:
    grid = FakeGrid({10: hello(0)})
    nodes = Nodes(Post(grid, {}), CLIENTS, 0.2)
    assert nodes.look() == {0: 10}
    grid.answers = {10: lambda content: None, 11: hello(0)}  # the old one still counts as connected
    assert nodes.look() == {0: 11}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (hello(7), "it serves client 7, but there are 3"),
        (hello("0"), "the client of a reply are '0', not a int"),
        (hello(0, "0.0.1"), "it has fedmoe 0.0.1"),
        (lambda content: to_records(pack({"error": "DataError", "message": "no such file"}), {}), "no such file"),
    ],
)
def test_a_node_that_cannot_take_part_is_named_with_the_reason(answer: Answer, sentence: str) -> None:
    post = Post(FakeGrid({10: answer}), {})
    transport = GridTransport(post, Nodes(post, CLIENTS, 0.2), min_clients=1, deadline=1.0, join_seconds=0.3)
    with pytest.raises(RunError, match=r"0 nodes can take part after 0.3 seconds") as error:
        transport.__enter__()
    assert f"node 10: {sentence}" in str(error.value)


def test_nobody_is_waited_for_longer_than_the_deadline() -> None:
    post = Post(FakeGrid({10: lambda content: None}), {})
    begun = time.monotonic()
    assert list(post.send({0: Letter(10, pack({"do": "hello"}))}, 0.4)) == []
    assert 0.3 < time.monotonic() - begun < 5
