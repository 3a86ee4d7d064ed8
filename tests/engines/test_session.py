"""The verbs of a run: rounds that count as a whole or not at all, delivery, personalisation, scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from builders import (
    PARTICIPANTS,
    PLAIN,
    Around,
    Backwards,
    Outcome,
    Spy,
    opened,
    read_private,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_parts,
    tiny_setup,
    with_updates,
)
from contract.probes import PROBES
from fedmoe import wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import decode_tensors
from fedmoe.engines import session as session_module
from fedmoe.engines.frames import Cohort, frame_of, shared
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.messenger import Messenger
from fedmoe.engines.protocol import Transport
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError


def make(clients_per_round: int | None = None) -> Algorithm:
    return fedavg(FedAvgConfig(), tiny_setup(clients_per_round=clients_per_round))


class Recorder:
    """A transport that keeps frames and replies to each with its clients, none of whom is personalised yet."""

    trusted = True
    one_store = True

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        self.frames += frames
        yield from ((i, wire.pack({"clients": wire.unpack(f)[0]["clients"]})) for i, f in enumerate(frames))

    def asked(self, what: str) -> list[tuple[dict[str, Any], list[memoryview]]]:
        return [(header, blobs) for header, blobs in map(wire.unpack, self.frames) if header["do"] == what]


# Cohorts


def test_cohorts_are_clients_with_equal_keys_in_the_order_of_ids() -> None:
    broadcasts = {client: Broadcast({"w": torch.zeros(1 + client % 2)}) for client in (4, 1, 3, 0, 2, 6)}
    exchange = make().round[0]._replace(cohort_key=lambda b: len(b.model["w"]))
    cohorts = [cohort.clients for cohort in messenger(Recorder(), cohort_size=3).cohorts(broadcasts, exchange)]
    assert cohorts == [[0, 2, 4], [6], [1, 3]]


def messenger(transport: Transport, algorithm: Algorithm | None = None, cohort_size: Any = 3) -> Messenger:
    return Messenger(replace(tiny_parts(algorithm or make()), cohort_size=cohort_size), transport)


def test_nobody_is_no_cohort() -> None:
    assert messenger(Recorder(), cohort_size=lambda clients: clients).cohorts({}, make().round[0]) == []


def test_personalisation_is_shared_out_even_where_a_round_is_one_cohort() -> None:
    recorder = Recorder()
    delivered = dict.fromkeys(range(5), Broadcast({"w": torch.zeros(1)}))
    list(messenger(recorder, cohort_size=9).personalize(delivered, 2, 9, lambda _client: 0, Manifest()))
    assert [header["clients"] for header, _ in recorder.asked("personalize")] == [[0, 1, 2], [3, 4]]


def test_workers_change_neither_cohorts_nor_frames(tmp_path: Path) -> None:
    frames = []
    for workers in (1, 3):
        _, spy = run_spied(make(), tiny_federation(), tmp_path / str(workers), workers=workers, cohort_size=2)
        frames.append(spy.received)
    assert frames[0] == frames[1]


# Frames


def sent_in_one_frame(broadcasts: dict[ClientId, Tree]) -> tuple[dict[str, Any], list[memoryview]]:
    cohort = Cohort(list(broadcasts), list(shared(broadcasts).values()))
    return wire.unpack(frame_of({}, cohort, {}))


def test_a_shared_broadcast_is_sent_once() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    header, blobs = sent_in_one_frame({0: Broadcast({"w": one}), 1: Broadcast({"w": other}), 2: Broadcast({"w": one})})
    assert header["broadcast_index"] == [0, 1, 0]
    assert len(blobs) == 2


def test_the_same_tensor_under_another_name_is_another_broadcast() -> None:
    """Experts that start as one and the same: a client that holds the second is not sent the first."""
    start = torch.zeros(2)
    header, blobs = sent_in_one_frame({0: Broadcast({"0": start}), 1: Broadcast({"1": start})})
    assert [set(decode_tensors(blobs[which])) for which in header["broadcast_index"]] == [{"model/0"}, {"model/1"}]


# Rounds


class Garbled(Around):
    """A transport on whose way the updates of some clients become noise."""

    def __init__(self, inner: Transport, clients: Sequence[ClientId]) -> None:
        super().__init__(inner)
        self.clients = clients

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            exchanged = wire.unpack(frames[index])[0]["do"] == "exchange"
            yield index, with_updates(reply, self.clients, lambda _: b"noise") if exchanged else reply


def test_what_is_no_message_is_rejected_and_the_round_goes_on(tmp_path: Path) -> None:
    parts = tiny_parts(make())
    with opened(parts, tmp_path / "store") as transport:
        driver = Session(parts, Garbled(transport, [PLAIN]))
        record = driver.next_round()
    assert record.rejected == 1 and record.abandoned is None
    (rejection,) = driver.manifest.rejected
    assert rejection["client"] == PLAIN
    assert "not safetensors" in rejection["reason"]


# Rounds that are not completed


class Losing(Around):
    """A transport that loses the replies of some clients in some rounds."""

    def __init__(self, inner: Transport, lost: Mapping[int, Sequence[ClientId]]) -> None:
        super().__init__(inner)
        self.lost = lost

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            lost = self.lost.get(asked.get("round"), ()) if asked.get("phase") == "round" else ()
            if not set(lost) & set(asked["clients"]):
                yield index, reply


def test_a_client_that_does_not_reply_is_on_record_and_the_round_goes_on(tmp_path: Path) -> None:
    lost = lambda transport: Losing(transport, {1: [PLAIN]})  # noqa: E731
    outcome = run_algorithm(make(), tiny_federation(), tmp_path / "store", rounds=1, cohort_size=1, through=lost)
    rejected = [(row["client"], row["reason"]) for row in outcome.manifest["rejected"]]
    assert rejected == [(PLAIN, "it did not reply")]
    assert outcome.records[0].abandoned is None


@pytest.mark.parametrize(("min_clients", "abandoned"), [(3, False), (4, True)])
def test_a_round_needs_min_clients(min_clients: int, abandoned: bool, tmp_path: Path) -> None:
    parts = tiny_parts(make(), cohort_size=1, min_clients=min_clients)
    with opened(parts, tmp_path / "store") as transport:
        driver = Session(parts, Losing(transport, {1: [PLAIN]}))
        before = driver.server
        record = driver.next_round()
    assert (driver.server is before) == abandoned == (record.abandoned is not None)
    if abandoned:
        assert "3 of 4 replies" in record.abandoned and "min_clients=4" in record.abandoned


@pytest.mark.parametrize("name", ["lg_fedavg", "private_expert", "chosen_experts"])
def test_an_abandoned_round_leaves_private_states_as_they_were(name: str, tmp_path: Path) -> None:
    """With every reply of round 2 lost, round 3 is what round 2 would have been to private states: they start alike."""
    algorithm = algorithm_named(name)
    whole = named_versions(algorithm, tmp_path / "whole", {})
    broken = named_versions(algorithm, tmp_path / "broken", {2: PARTICIPANTS})
    assert whole[3] != whole[2], "in a straight run clients move on"
    assert broken[3] == whole[2] == broken[2]


@pytest.mark.parametrize("name", ["lg_fedavg", "private_expert"])
def test_who_replied_to_an_abandoned_round_starts_from_where_it_was_before(name: str, tmp_path: Path) -> None:
    """One reply of four is lost and four are needed: the states that the other three came to do not count."""
    versions = named_versions(algorithm_named(name), tmp_path / "store", {2: [PLAIN]}, min_clients=len(PARTICIPANTS))
    assert versions[3] == versions[2] and all(versions[2].values())


class LosingTheSecond(Around):
    """A transport that loses every reply to the second exchange of a round."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            if wire.unpack(frames[index])[0].get("index") != 1:
                yield index, reply


def test_a_round_that_is_abandoned_late_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    """What the first exchange of the round came to does not count either."""
    algorithm = make()
    (train,) = algorithm.round
    parts = tiny_parts(algorithm._replace(round=(train, train._replace(name="again"))))
    with opened(parts, tmp_path / "store") as transport:
        driver = Session(parts, LosingTheSecond(transport))
        before = driver.server
        assert driver.next_round().abandoned
    assert driver.server is before


@pytest.mark.parametrize("name", ["lg_fedavg", "private_expert"])
def test_a_rejected_update_leaves_its_client_where_it_was(name: str, tmp_path: Path) -> None:
    algorithm = algorithm_named(name)
    versions = named_versions(algorithm, tmp_path / "store", {2: [PLAIN]})
    assert versions[3][PLAIN] == versions[2][PLAIN]
    assert all(versions[3][client] > versions[2][client] for client in PARTICIPANTS if client != PLAIN)


def algorithm_named(name: str) -> Algorithm:
    entry = {**CATALOG, **PROBES}[name]
    return entry.factory(entry.config(), tiny_setup(clients_per_round=None))


def named_versions(
    algorithm: Algorithm, store: Path, lost: Mapping[int, Sequence[ClientId]], **schedule: Any
) -> dict[int, dict[ClientId, int]]:
    """The state versions that messages of each round named, in its first exchange."""
    spies: list[Spy] = []

    def through(transport: Transport) -> Transport:
        spies.append(Spy(transport))
        return Losing(spies[0], lost)

    run_algorithm(algorithm, tiny_federation(), store, rounds=3, cohort_size=1, through=through, **schedule)
    asked = [wire.unpack(frame)[0] for frame in spies[0].received]
    rounds: dict[int, dict[ClientId, int]] = {}
    for header in asked:
        if (header.get("phase"), header.get("index")) == ("round", 0):
            rounds.setdefault(header["round"], {})[header["clients"][0]] = header["state_versions"][0]
    return rounds


def test_whoever_is_lost_in_round_two_trains_in_round_three_from_its_state_of_round_one(tmp_path: Path) -> None:
    """The state of the lost update is in the store, newer than the one that counts, and nobody reads it."""
    algorithm = algorithm_named("lg_fedavg")
    parts = tiny_parts(algorithm, rounds=3, cohort_size=1)
    with opened(parts, tmp_path / "store") as transport:
        driver = Session(parts, Losing(transport, {2: [PLAIN]}))
        for _ in range(3):
            driver.next_round()
    rows = read_private(tmp_path / "store")
    rounds = {version: int(load(row)["rounds"]) for (kind, client, version), row in rows.items() if client == PLAIN}
    assert sorted(rounds.values()) == [1, 2, 2]  # rounds 1, 2 (lost) and 3, which went on from 1


# Validation


def test_the_best_round_is_chosen_on_the_same_clients_each_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(session_module, "VALIDATION_CLIENTS", 2)
    algorithm = fedavg(FedAvgConfig(validate_every=1), tiny_setup(clients_per_round=None))
    _, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store", rounds=4)
    panels: dict[int, set[ClientId]] = {}
    for sent in spy.exchanged:
        if sent.asked["phase"] == "validation":
            panels.setdefault(sent.asked["round"], set()).update(sent.asked["clients"])
    assert len(panels) == 4 and len(panels[1]) == 2
    assert all(panel == panels[1] for panel in panels.values())


def test_rejections_are_in_the_order_of_ids_whoever_replied_first(tmp_path: Path) -> None:
    outcome = run_algorithm(
        make(), tiny_federation(), tmp_path / "store", rounds=1, cohort_size=1, max_update_norm=1e-6, through=Backwards
    )
    assert [one["client"] for one in outcome.manifest["rejected"]] == list(PARTICIPANTS)


def test_an_update_beyond_the_norm_bound_is_rejected(tmp_path: Path) -> None:
    outcome = run_algorithm(make(), tiny_federation(), tmp_path / "store", rounds=1, max_update_norm=1e-6)
    assert [one["client"] for one in outcome.manifest["rejected"]] == list(PARTICIPANTS)
    assert all("max_update_norm" in one["reason"] for one in outcome.manifest["rejected"])


def test_a_client_that_claims_more_examples_than_the_schedule_declares_is_rejected(tmp_path, caplog):
    with caplog.at_level("INFO", logger="fedmoe"):
        outcome = run_algorithm(make(), tiny_federation(), tmp_path / "store", rounds=1, max_examples=5)
    rejected = outcome.manifest["rejected"]
    assert rejected and all("num_examples is" in one["reason"] and "from 0 to 5" in one["reason"] for one in rejected)
    assert f"client {rejected[0]['client']} is rejected: {rejected[0]['reason']}" in caplog.text


def test_an_error_that_the_user_can_fix_travels_back(tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise ConfigError("training.batch_size is odd. Make it even.")

    algorithm = make()
    parts = tiny_parts(algorithm._replace(round=(algorithm.round[0]._replace(local_update=broken),)), workers=2)
    with (
        pytest.raises(ConfigError, match="Make it even"),
        opened(parts, tmp_path / "store") as transport,
    ):
        Session(parts, transport).next_round()


def test_another_seed_draws_other_clients(tmp_path: Path) -> None:
    drawn = [
        clients_of_rounds(run_algorithm(make(2), tiny_federation(), tmp_path / name, seed=seed, rounds=5))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def clients_of_rounds(outcome: Outcome) -> list[list[ClientId]]:
    return [record.clients for record in outcome.records]


def test_more_clients_than_opted_in_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clients_per_round=5, but only 4 clients opted in"):
        run_algorithm(make(5), tiny_federation(), tmp_path / "store")


def test_nothing_to_release_is_noted() -> None:
    assert any("has nothing to release" in note for note in tiny_parts(make(), release=True).notes)


def test_personalised_clients_are_not_trained_again(tmp_path: Path) -> None:
    parts = tiny_parts(algorithm_named("fine_tuned"), cohort_size=3)
    with opened(parts, tmp_path / "store") as transport:
        spy = Spy(transport)
        driver = Session(parts, spy)
        driver.deliver(range(7))
        begun = driver.personalize()
        assert next(begun) == []
        finished = next(begun)
        assert next(iter(list(driver.personalize()))) == finished
        trained = [sent.asked["clients"] for sent in spy.sent if sent.asked["do"] == "personalize"]
    assert sorted(client for cohort in trained for client in cohort) == list(range(7))


def test_a_stop_while_personalising_changes_no_clients_company(tmp_path: Path) -> None:
    """Finished cohorts are skipped, not their clients: on the batched backend company can change the last bits."""
    cohorts = []
    for stops, folder in ((False, "whole"), (True, "stopped")):
        parts = tiny_parts(algorithm_named("fine_tuned"), cohort_size=3)
        with opened(parts, tmp_path / folder) as transport:
            spy = Spy(transport)
            driver = Session(parts, spy)
            driver.deliver(range(7))
            if stops:
                begun = driver.personalize()
                next(begun), next(begun)
            list(driver.personalize())
            cohorts.append([sent.asked["clients"] for sent in spy.sent if sent.asked["do"] == "personalize"])
    assert cohorts[0] == cohorts[1]


# What an algorithm may say about single clients


def test_a_broadcast_of_none_asks_that_client_nothing(tmp_path: Path) -> None:
    unasked, *others = PARTICIPANTS
    algorithm = make()
    train = algorithm.round[0]
    shy = train._replace(broadcast=lambda server, client, replies: _unless(client == unasked, train, server, client))
    outcome = run_algorithm(algorithm._replace(round=(shy,)), tiny_federation(), tmp_path / "store")
    sent = {int(client): list(rows) for client, rows in outcome.manifest["messages_of_client"].items()}
    assert "train" not in sent[unasked]
    assert all("train" in sent[client] for client in others)
    assert outcome.manifest["rejected"] == []


def _unless(unasked: bool, exchange: Any, server: Tree, client: ClientId) -> Tree:
    return None if unasked else exchange.broadcast(server, client, [])


def test_an_update_whose_values_the_algorithm_rejects_does_not_count(tmp_path: Path) -> None:
    algorithm = make()
    strict = algorithm.round[0]._replace(
        rejection=lambda update, _sent: "too many" if update.num_examples > 3 else None
    )
    outcome = run_algorithm(algorithm._replace(round=(strict,)), tiny_federation(), tmp_path / "store", rounds=1)
    rejected = {row["client"] for row in outcome.manifest["rejected"]}
    assert rejected and {row["reason"] for row in outcome.manifest["rejected"]} == {"too many"}
    assert all("train" not in outcome.manifest["messages_of_client"].get(str(client), {}) for client in rejected)
