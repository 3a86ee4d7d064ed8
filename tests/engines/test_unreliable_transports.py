"""Replies that are lost, late, doubled or hostile: each is a rejection on record, and the run goes on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import (
    PARTICIPANTS,
    PLAIN,
    Around,
    Outcome,
    opened,
    read_private,
    run_algorithm,
    tiny_federation,
    tiny_parts,
    tiny_setup,
)
from contract.probes import PROBES
from fedmoe import wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.engines.protocol import Transport
from fedmoe.engines.session import Session
from fedmoe.errors import RunError


def algorithm_named(name: str, clients_per_round: int | None = None) -> Algorithm:
    entry = {**CATALOG, **PROBES}[name]
    return entry.factory(entry.config(), tiny_setup(clients_per_round=clients_per_round))


def run(name: str, store: Path, through: Any = lambda transport: transport, **options: Any) -> Outcome:
    return run_algorithm(algorithm_named(name), tiny_federation(), store, cohort_size=1, through=through, **options)


class Doubling(Around):
    """Every reply arrives twice, the second time after all the others, with replies to nothing in between."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        replies = list(self.inner.run(frames))
        yield from [*replies, (len(frames), b""), (-1, replies[0][1] if replies else b""), *replies]


@pytest.mark.parametrize("name", ["fedavg", "chosen_experts", "fine_tuned", "calibrated"])
def test_a_reply_that_arrives_twice_counts_once(name: str, tmp_path: Path) -> None:
    once, twice = run(name, tmp_path / "once"), run(name, tmp_path / "twice", Doubling)
    assert once.fingerprint() == twice.fingerprint()


class Late(Around):
    """The reply to each request of a client is delivered in place of that to its next one of the same kind."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.earlier: dict[Any, bytes] = {}

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            kind = (asked["do"], asked.get("phase"), *asked["clients"])
            if asked["do"] == "exchange" and asked["clients"] == [PLAIN]:
                self.earlier[kind], reply = reply, self.earlier.get(kind, reply)
            yield index, reply


def test_a_reply_to_an_earlier_round_is_rejected_and_leaves_its_client_where_it_was(tmp_path: Path) -> None:
    outcome = run("lg_fedavg", tmp_path / "store", Late, rounds=3)
    rejected = [(row["round"], row["client"]) for row in outcome.manifest["rejected"] if row["exchange"] == "train"]
    assert rejected == [(2, PLAIN), (3, PLAIN)]
    assert all("replied to 'round:" in row["reason"] for row in outcome.manifest["rejected"])


class Replying(Around):
    """What the workers of other nodes reply to some kind of request is something else."""

    trusted = False
    one_store = True

    def __init__(self, inner: Transport, do: str, reply: bytes | None) -> None:
        super().__init__(inner)
        self.do, self.reply = do, reply

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            if asked["do"] != self.do or PLAIN not in asked["clients"]:
                yield index, reply
            elif self.reply is not None:
                yield index, self.reply


HOSTILE = {
    "nothing": None,
    "noise": b"noise",
    "an error": wire.pack({"error": "RunError", "message": "the disk\x1b[31m is full"}),
    "other clients": wire.pack({"clients": [0, 1]}),
    "no clients": wire.pack({"clients": {"3": 1}}),
    "an empty header": wire.pack({}),
}


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("do", ["exchange", "personalize", "score"])
def test_whatever_a_node_replies_the_run_goes_on_without_it(do: str, reply: str, tmp_path: Path) -> None:
    outcome = run("fine_tuned", tmp_path / "store", lambda inner: Replying(inner, do, HOSTILE[reply]), rounds=1)
    rows = [row for row in outcome.manifest["rejected"] if row["exchange"] in (do, "train")]
    assert {row["client"] for row in rows} == {PLAIN} and len(rows) >= 1
    assert all(row["reason"] and row["reason"].isprintable() for row in rows)
    assert {score.client for score in outcome.scores} >= {*PARTICIPANTS} - {PLAIN}


class Deaf(Around):
    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        yield from ()


def test_a_worker_that_cannot_be_asked_is_said(tmp_path: Path) -> None:
    parts = tiny_parts(algorithm_named("fine_tuned"))
    with opened(parts, tmp_path / "store") as transport:
        session = Session(parts, Deaf(transport))
        session.deliver(PARTICIPANTS)
        with pytest.raises(RunError, match="no worker replied to 'personalized'"):
            list(session.personalize())


class Losing(Around):
    """Loses what one client replies in every round."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            if (asked["do"], asked["clients"]) != ("exchange", [PLAIN]):
                yield index, reply


@pytest.mark.parametrize("name", ["lg_fedavg", "private_expert", "chosen_experts"])
def test_states_of_updates_that_never_count_do_not_pile_up(name: str, tmp_path: Path) -> None:
    parts = tiny_parts(algorithm_named(name), rounds=12, cohort_size=1)
    with opened(parts, tmp_path / "store") as transport:
        session = Session(parts, Losing(transport))
        for step in range(1, 13):
            session.next_round()
            session.drop_superseded(step - 1)
    for client in PARTICIPANTS:
        versions = {version for _, one, version in read_private(tmp_path / "store") if one == client}
        assert 1 <= len(versions) <= 3, f"client {client} has states of {len(versions)} versions"
    assert session.missing_states([]) == []


@pytest.mark.parametrize("name", ["lg_fedavg", "private_expert", "chosen_experts"])
def test_a_rejected_update_changes_no_later_message(name: str, tmp_path: Path) -> None:
    """Byte for byte, a client whose replies of round 2 are lost sends in round 3 what it would send had it not been
    sampled in round 2."""
    replies = {}
    for how in ("lost", "unsampled"):
        algorithm = algorithm_named(name)
        if how == "unsampled":
            plain = algorithm.sample
            algorithm = algorithm._replace(
                sample=lambda server, number, pool, rng, plain=plain: (
                    pool[pool != PLAIN] if number == 2 else plain(server, number, pool, rng)
                )
            )
        parts = tiny_parts(algorithm, rounds=3, cohort_size=1)
        with opened(parts, tmp_path / how) as transport:
            keeping = _LosingOnce(transport)
            session = Session(parts, keeping)
            while not session.is_trained:
                session.next_round()
        replies[how] = keeping.of_round_three
    assert replies["lost"] == replies["unsampled"] and replies["lost"]


class _LosingOnce(Around):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.of_round_three: list[bytes] = []

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            if asked["do"] == "exchange" and asked["phase"] == "round":
                if asked["round"] == 2 and asked["clients"] == [PLAIN]:
                    continue
                if asked["round"] == 3:
                    self.of_round_three.append(bytes(reply))
            yield index, reply
