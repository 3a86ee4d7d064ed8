"""Whatever a server asks for, a worker replies with a frame: the work, or an error that says what is wrong."""

import json
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PARTICIPANTS, PLAIN, RUN_ID, Spy, opened, tiny_parts, tiny_setup
from contract.probes import PROBES
from fedmoe import wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.engines.requests import FIELDS
from fedmoe.engines.session import Session
from fedmoe.engines.worker import Worker
from fedmoe.errors import MessageError


def algorithm_named(name: str) -> Algorithm:
    entry = {**CATALOG, **PROBES}[name]
    return entry.factory(entry.config(), tiny_setup())


@cache
def requests() -> dict[str, bytes]:
    """One of each kind, as a session sends them."""
    with TemporaryDirectory() as folder:
        parts = tiny_parts(algorithm_named("private_expert"), rounds=2)
        with opened(parts, Path(folder) / "store") as transport:
            spy = Spy(transport)
            session = Session(parts, spy)
            records = [session.next_round()._asdict(), session.next_round()._asdict()]
            session.missing_states(records)
            session.drop_superseded(2)
            session.deliver(PARTICIPANTS)
            list(session.personalize())
            list(session.score())
            with suppress(MessageError):
                list(session.leave_models())
            session.validation_scores()
            session.forget_later_states()
    return {wire.unpack(frame)[0]["do"]: bytes(frame) for frame in reversed(spy.received)}


@cache
def worker() -> Worker:
    folder = TemporaryDirectory()
    parts = tiny_parts(algorithm_named("private_expert"))
    made = Worker(parts, Path(folder.name) / "store", RUN_ID, keep_model=lambda *_: None)
    made.folder = folder  # type: ignore[attr-defined]  # lives as long
    return made


def reply(header: dict[str, Any], blobs: list[memoryview]) -> dict[str, Any]:
    return wire.unpack(worker().handle(wire.pack(header, [[blob] for blob in blobs])))[0]


def refused(do: str, **changes: Any) -> str:
    header, blobs = wire.unpack(requests()[do])
    said = reply({**header, **changes}, blobs)
    assert said["error"] == "MessageError"
    return str(said["message"])


def test_every_kind_of_request_is_here() -> None:
    assert requests().keys() == FIELDS.keys()


JUNK = [None, True, -1, 0, 1, 3, 6, 7, 2**63, 10**400, 1.5, "", "0", "round", "release", [], [[]], [0], [[0, 1]], {}]


@settings(deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_any_change_of_a_header_is_done_or_refused(do: str, data: st.DataObject) -> None:
    header, blobs = wire.unpack(requests()[do])
    for _ in range(data.draw(st.integers(1, 2))):
        _change_somewhere(header, data)
    assert isinstance(reply(header, blobs), dict)


def _change_somewhere(node: Any, data: st.DataObject) -> None:
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if isinstance(node[key], list) and data.draw(st.booleans()):
        _change_somewhere(node[key], data)
    elif isinstance(node, list) and data.draw(st.booleans()):
        node.append(deepcopy(node[key]))
    elif data.draw(st.booleans()):
        node[key] = deepcopy(data.draw(st.sampled_from(JUNK)))
    else:
        del node[key]


@settings(deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_any_bytes_are_done_or_refused(do: str, data: st.DataObject) -> None:
    """Of the frame's header; broadcasts of other shapes are for the algorithm to notice."""
    frame = bytearray(requests()[do])
    head = 8 + int.from_bytes(frame[:8], "big")
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(frame)) | st.just(len(frame)))
    assert isinstance(wire.unpack(worker().handle(frame[:end]))[0], dict)


@pytest.mark.parametrize(
    ("do", "changes", "said"),
    [
        ("exchange", {"clients": [PLAIN, 99]}, "clients from 0 to 6"),
        ("exchange", {"clients": [PLAIN, PLAIN]}, "different clients"),
        ("exchange", {"clients": [], "state_versions": [], "broadcast_index": []}, "at least one"),
        ("exchange", {"clients": [True, PLAIN]}, "clients = "),
        ("exchange", {"state_versions": [0]}, "one for each of 2 clients"),
        ("exchange", {"broadcast_index": [0, 1]}, "places among 1 broadcasts"),
        ("exchange", {"broadcast_index": [-1, 0]}, "broadcast_index = "),
        ("exchange", {"phase": "everything"}, "one of round, after_rounds"),
        ("exchange", {"phase": "validation"}, "one of the 0 exchanges"),
        ("exchange", {"index": 5}, "one of the 1 exchanges"),
        ("exchange", {"version": 0}, "later than the state_versions"),
        ("exchange", {"version": "9"}, "version = '9'"),
        ("exchange", {"round": 2**63}, "round = 9223372036854775808"),
        ("exchange", {"reply_to": "x" * 10**6}, "a short text"),
        ("score", {"send": 1}, "true or false"),
        ("validate", {"clients": [99]}, "clients from 0 to 6"),
        ("validate", {"reply_to": 3}, "a short text"),
        ("forget", {"version": -1}, "version = -1"),
        ("personalize", {"version": None}, "version = None"),
        ("drop", {"states": [[0, 1]]}, r"[client, version, before]"),
        ("find_missing", {"states": {"0": 1}}, "states = "),
        ("find_missing", {"states": [[0, 1], [0, 2]]}, "different clients"),
    ],
)
def test_a_request_that_is_none_is_refused_in_words(do: str, changes: dict[str, Any], said: str) -> None:
    message = refused(do, **changes)
    assert said in message and len(message) < 700


def test_nothing_is_personalised_where_the_algorithm_does_not(tmp_path: Path) -> None:
    own = Worker(tiny_parts(algorithm_named("fedavg")), tmp_path / "store", RUN_ID)
    assert "this algorithm does not" in wire.unpack(own.handle(requests()["personalize"]))[0]["message"]


def test_broadcasts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    header = {
        "do": "exchange", "phase": "round", "index": 0, "round": 1, "version": None, "reply_to": "round:1:0",
        "clients": list(PARTICIPANTS[:2]), "state_versions": [0, 0], "broadcast_index": [0, 1],
    }  # fmt: skip
    blobs = [wire.encode(Broadcast({"w": torch.zeros(size)})) for size in (1, 2)]
    own = Worker(tiny_parts(algorithm_named("fedavg")), tmp_path / "store", RUN_ID)
    assert "differ in names or shapes" in wire.unpack(own.handle(wire.pack(header, blobs)))[0]["message"]


def test_deeply_nested_headers_are_refused() -> None:
    text = json.dumps({"sizes": [], "header": {}}).replace("{}", "[" * 10**5)
    frame = len(text).to_bytes(8, "big") + text.encode()
    assert wire.unpack(worker().handle(frame))[0]["error"] == "MessageError"
