from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import (
    PARTICIPANTS,
    PLAIN,
    Backwards,
    Outcome,
    Spy,
    run_algorithm,
    run_spied,
    started,
    tiny_federation,
    tiny_setup,
    with_updates,
)
from fedmoe import wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import decode_tensors
from fedmoe.engines.frames import shared
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.session import Coordinator, Transport
from fedmoe.errors import ConfigError, RunError


def make(clients_per_round: int | None = None) -> Algorithm:
    return fedavg(FedAvgConfig(), tiny_setup(clients_per_round=clients_per_round))


def coordinator(transport: Transport, algorithm: Algorithm | None = None, **options: Any) -> Coordinator:
    chosen = {"seed": 0, "rounds": 2, "cohort_size": 3, "manifest": Manifest(), **options}
    return Coordinator(algorithm or make(), tiny_federation(), transport, **chosen)


class Recorder:
    """A transport that keeps frames and answers each with its clients."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        self.frames += frames
        yield from ((i, wire.pack({"clients": wire.unpack(f)[0]["clients"]})) for i, f in enumerate(frames))


# Cohorts


def test_cohorts_are_clients_with_equal_keys_in_the_order_of_ids() -> None:
    broadcasts = {client: Broadcast({"w": torch.zeros(1 + client % 2)}) for client in (4, 1, 3, 0, 2, 6)}
    exchange = make().round[0]._replace(cohort_key=lambda b: len(b.model["w"]))
    cohorts = [cohort.clients for cohort in coordinator(Recorder()).cohorts(broadcasts, exchange)]
    assert cohorts == [[0, 2, 4], [6], [1, 3]]


def test_nobody_is_no_cohort() -> None:
    assert coordinator(Recorder(), cohort_size=lambda clients: clients).cohorts({}, make().round[0]) == []


def test_personalisation_is_shared_out_even_where_a_round_is_one_cohort() -> None:
    recorder = Recorder()
    kept = dict.fromkeys(range(5), Broadcast({"w": torch.zeros(1)}))
    list(coordinator(recorder, cohort_size=9)._on_cohorts({"do": "personalize"}, kept))
    assert [wire.unpack(frame)[0]["clients"] for frame in recorder.frames] == [[0, 1, 2], [3, 4]]


def test_workers_change_neither_cohorts_nor_frames(tmp_path: Path) -> None:
    frames = []
    for workers in (1, 3):
        _, spy = run_spied(make(), tiny_federation(), tmp_path / str(workers), workers=workers, cohort_size=2)
        frames.append(spy.received)
    assert frames[0] == frames[1]


# Frames


def sent_in_one_frame(broadcasts: dict[ClientId, Tree]) -> tuple[dict[str, Any], list[bytes]]:
    recorder = Recorder()
    exchange = make().delivery[-1]._replace(cohort_key=lambda _: 0)
    driver = coordinator(recorder, make()._replace(delivery=(exchange,)), cohort_size=9)
    list(driver._run({"do": "personalize"}, driver.cohorts(shared(broadcasts), exchange)))
    (frame,) = recorder.frames
    return wire.unpack(frame)


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


def test_a_round_without_any_good_update_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    algorithm = make()
    server = algorithm.init_server(0)
    with started(algorithm, tiny_federation(), tmp_path / "store") as transport:
        after, record = coordinator(Garbled(transport, PARTICIPANTS)).run_round(server, 1)
    assert after is server
    assert record.refused == len(PARTICIPANTS)


class Garbled:
    """A transport on whose way the updates of some clients become noise."""

    def __init__(self, inner: Transport, clients: Sequence[ClientId]) -> None:
        self.inner, self.clients = inner, clients

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, answer in self.inner.run(frames):
            yield index, with_updates(answer, self.clients, lambda _: b"noise")


def test_what_is_no_message_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    algorithm = make()
    with started(algorithm, tiny_federation(), tmp_path / "store") as transport:
        driver = coordinator(Garbled(transport, [PLAIN]))
        _, record = driver.run_round(algorithm.init_server(0), 1)
    assert record.refused == 1
    (refusal,) = driver.manifest.refused
    assert refusal["client"] == PLAIN
    assert "not safetensors" in refusal["reason"]


def test_refusals_are_in_the_order_of_ids_whoever_answered_first(tmp_path: Path) -> None:
    outcome = run_algorithm(
        make(), tiny_federation(), tmp_path / "store", rounds=1, cohort_size=1, max_update_norm=1e-6, through=Backwards
    )
    assert [one["client"] for one in outcome.manifest["refused"]] == list(PARTICIPANTS)


def test_an_update_beyond_the_norm_bound_is_refused(tmp_path: Path) -> None:
    outcome = run_algorithm(make(), tiny_federation(), tmp_path / "store", rounds=1, max_update_norm=1e-6)
    assert [one["client"] for one in outcome.manifest["refused"]] == list(PARTICIPANTS)
    assert all("max_update_norm" in one["reason"] for one in outcome.manifest["refused"])


def test_an_error_that_the_user_can_mend_travels_back(tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise ConfigError("training.batch_size is odd. Make it even.")

    algorithm = make()
    algorithm = algorithm._replace(round=(algorithm.round[0]._replace(local_update=broken),))
    with (
        pytest.raises(ConfigError, match="Make it even"),
        started(algorithm, tiny_federation(), tmp_path / "store", workers=2) as transport,
    ):
        coordinator(transport, algorithm).run_round(algorithm.init_server(0), 1)


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


def test_nothing_to_release_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing to release"):
        run_algorithm(make(), tiny_federation(), tmp_path / "store", release=True)


def test_personalised_clients_are_not_trained_again(tmp_path: Path) -> None:
    entry = CATALOG["fine_tuned"]
    algorithm = entry.factory(entry.config(), tiny_setup())
    with started(algorithm, tiny_federation(), tmp_path / "store") as transport:
        spy = Spy(transport)
        driver = coordinator(spy, algorithm)
        kept = driver.deliver(algorithm.init_server(0), range(7))
        begun = driver.personalize(kept)
        assert next(begun) == []
        finished = next(begun)
        assert next(iter(list(driver.personalize(kept)))) == finished
        trained = [sent.asked["clients"] for sent in spy.sent if sent.asked["do"] == "personalize"]
    assert sorted(client for cohort in trained for client in cohort) == list(range(7))


# What an algorithm may say about single clients


def test_a_broadcast_of_none_asks_that_client_nothing(tmp_path: Path) -> None:
    silent, *others = PARTICIPANTS
    algorithm = make()
    train = algorithm.round[0]
    shy = train._replace(broadcast=lambda server, client, replies: _unless(client == silent, train, server, client))
    outcome = run_algorithm(algorithm._replace(round=(shy,)), tiny_federation(), tmp_path / "store")
    sent = {int(client): list(rows) for client, rows in outcome.manifest["messages_of_client"].items()}
    assert "train" not in sent[silent]
    assert all("train" in sent[client] for client in others)
    assert outcome.manifest["refused"] == []


def _unless(silent: bool, exchange: Any, server: Tree, client: ClientId) -> Tree:
    return None if silent else exchange.broadcast(server, client, [])


def test_an_update_whose_values_the_algorithm_refuses_does_not_count(tmp_path: Path) -> None:
    algorithm = make()
    strict = algorithm.round[0]._replace(
        rejection=lambda update, _sent: "too many" if update.num_examples > 3 else None
    )
    outcome = run_algorithm(algorithm._replace(round=(strict,)), tiny_federation(), tmp_path / "store", rounds=1)
    refused = {row["client"] for row in outcome.manifest["refused"]}
    assert refused and {row["reason"] for row in outcome.manifest["refused"]} == {"too many"}
    assert all("train" not in outcome.manifest["messages_of_client"].get(str(client), {}) for client in refused)
