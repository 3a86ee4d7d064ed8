"""The client's side: what it sends is decided by its own copy of the rules, whatever a request asks for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import EMPTY, OPTED_OUT, PLAIN, RUN_ID, UNSEEN, run_spied, tiny_federation, tiny_parts, tiny_setup
from contract.probes import PROBES
from fedmoe import wire
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.engines.worker import Worker


def asked(name: str, store: Path, phase: str, **options: Any) -> tuple[bytes, Any]:
    """A valid frame of this phase, and the algorithm that it is for."""
    entry = {**CATALOG, **PROBES}[name]
    algorithm = entry.factory(entry.config(), tiny_setup())
    _, spy = run_spied(algorithm, tiny_federation(), store, cohort_size=1, **options)
    frames = [frame for frame in spy.received if wire.unpack(frame)[0].get("phase") == phase]
    return frames[0], algorithm


def reply(worker: Worker, frame: bytes, **changes: Any) -> dict[str, Any]:
    header, blobs = wire.unpack(frame)
    return wire.unpack(worker.handle(wire.pack({**header, **changes}, [[blob] for blob in blobs])))[0]


@pytest.mark.parametrize("client", [OPTED_OUT, EMPTY, UNSEEN])
@pytest.mark.parametrize("phase", ["round", "validation", "release"])
def test_a_client_that_does_not_take_part_sends_nothing(client: int, phase: str, tmp_path: Path) -> None:
    name = {"round": "fedavg", "validation": "fedavg", "release": "fedmix"}[phase]
    frame, algorithm = asked(name, tmp_path / "store", phase, release=phase == "release")
    worker = Worker(tiny_parts(algorithm, release=phase == "release"), tmp_path / "own", RUN_ID)
    assert "error" not in reply(worker, frame, clients=[PLAIN], state_versions=[0], version=None)
    said = reply(worker, frame, clients=[client], state_versions=[0], version=None)
    assert said["error"] == "MessageError" and f"client {client} does not take part" in said["message"]


def test_private_parts_are_not_released_where_the_clients_own_config_does_not_say_so(tmp_path: Path) -> None:
    frame, algorithm = asked("fedmix", tmp_path / "store", "release", release=True)
    worker = Worker(tiny_parts(algorithm), tmp_path / "own", RUN_ID)
    assert "schedule.release is off here" in reply(worker, frame, state_versions=[0])["message"]


@pytest.mark.parametrize("name", ["biased_fedavg", "fedmix"])
def test_a_release_keeps_no_state(name: str, tmp_path: Path) -> None:
    frame, _ = asked(name, tmp_path / "store", "release", release=True)
    assert wire.unpack(frame)[0]["version"] is None


def test_unknown_work_is_refused_in_words(tmp_path: Path) -> None:
    frame, algorithm = asked("fedavg", tmp_path / "store", "round")
    worker = Worker(tiny_parts(algorithm), tmp_path / "own", RUN_ID)
    assert "'close'; known: exchange" in reply(worker, frame, do="close")["message"]


@pytest.mark.parametrize(("asked_here", "sends"), [("all", True), ("none", False)])
def test_scores_are_not_sent_where_the_clients_own_config_does_not_say_so(
    asked_here: Any, sends: bool, tmp_path: Path
) -> None:
    algorithm = CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), tiny_setup())
    _, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store")
    frame = next(frame for frame in spy.received if wire.unpack(frame)[0]["do"] == "score")
    parts = tiny_parts(algorithm)
    evaluation = parts.config.evaluation.model_copy(update={"clients_asked": asked_here})
    config = parts.config.model_copy(update={"evaluation": evaluation})
    said = reply(Worker(replace(parts, config=config), tmp_path / "own", RUN_ID), frame)
    assert ("groups" in said) == sends
    if not sends:
        assert "evaluation.clients_asked says so" in said["message"]


@pytest.mark.parametrize(
    ("client", "asked_here", "sends"), [(PLAIN, "all", True), (PLAIN, "none", False), (OPTED_OUT, "all", False)]
)
def test_validation_scores_are_sent_by_clients_that_train_and_send_scores(
    client: int, asked_here: Any, sends: bool, tmp_path: Path
) -> None:
    algorithm = CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), tiny_setup())
    parts = tiny_parts(algorithm)
    evaluation = parts.config.evaluation.model_copy(update={"clients_asked": asked_here})
    worker = Worker(
        replace(parts, config=parts.config.model_copy(update={"evaluation": evaluation})), tmp_path / "own", RUN_ID
    )
    header = {
        "do": "validate", "reply_to": "v", "clients": [client], "state_versions": [0], "broadcast_index": [0],
    }  # fmt: skip
    broadcast = algorithm.delivery[-1].broadcast(algorithm.init_server(0), client, [])
    said = wire.unpack(worker.handle(wire.pack(header, [wire.encode(broadcast)])))[0]
    assert ("groups" in said) == sends
    if not sends:
        assert ("does not take part" in said["message"]) == (client == OPTED_OUT)
