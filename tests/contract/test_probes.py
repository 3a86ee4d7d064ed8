"""What the probes show of the contract beyond what holds for every algorithm."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from builders import (
    EMPTY,
    NO_VALIDATION_IN,
    ONE_RECORD,
    OPTED_OUT,
    PARTICIPANTS,
    PLAIN,
    SOME_OPTED_OUT,
    UNSEEN,
    Around,
    Outcome,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_parts,
    tiny_setup,
    with_updates,
)
from contract.probes import NUM_CHOSEN, NUM_EXPERTS, PROBES, PrivateGates, PrivatePersonal
from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.core_types import ClientId, Tensors
from fedmoe.encoding import decode_tensors
from fedmoe.engines.messenger import Messenger


def make(name: str, **options: Any) -> Algorithm:
    return PROBES[name].factory(PROBES[name].config(**options), tiny_setup(clients_per_round=None))


def newest(outcome: Outcome, kind: str, client: ClientId) -> Tensors:
    return load(max((version, row) for (k, c, version), row in outcome.private.items() if (k, c) == (kind, client))[1])


# What the server observes of the experts after each round


def test_the_load_is_how_many_examples_each_expert_was_sent_to(tmp_path: Path) -> None:
    outcome, spy = run_spied(make("chosen_experts"), tiny_federation(), tmp_path / "store", rounds=1)
    counts = dict(zip(PARTICIPANTS, (6, 1, 7, 6), strict=True))  # opted-in training records
    work = torch.zeros(NUM_EXPERTS)
    for reply in (one for one in spy.exchanged if one.asked["index"] == 0 and one.asked["phase"] == "round"):
        for client, (choice, _) in reply.messages.items():
            work[[client] if client == 0 else choice["experts"]] += counts[client]
    experts = outcome.records[0].experts
    assert experts["load"] == pytest.approx((work / work.sum()).tolist(), abs=1e-4)
    assert [value is None for value in experts["divergence"]] == (work == 0).tolist()


def test_load_and_assignment_are_what_clients_reported(tmp_path: Path) -> None:
    outcome = run_algorithm(make("pruned_experts"), tiny_federation(), tmp_path / "store")
    counts = torch.tensor([6.0, 1.0, 7.0, 6.0])
    usage_SK = outcome.server.usage[list(PARTICIPANTS)]
    for record in outcome.records:
        assert sum(record.experts["load"]) == pytest.approx(1, abs=1e-3)
        assert all(0 <= value <= 4 * 0.5 for value in record.experts["divergence"])  # four named parameters each
    experts = outcome.records[-1].experts
    assert experts["load"] == pytest.approx((counts @ usage_SK / counts.sum()).tolist(), abs=1e-4)
    assert experts["assignment"]["of"] == "client" and len(experts["assignment"]["shares"]) == 6
    assert experts["usage_entropy"] == pytest.approx(float(torch.special.entr(usage_SK).sum(1).mean()), abs=1e-4)


def test_observing_changes_nothing_that_is_sent_or_stored(tmp_path: Path) -> None:
    seen, unseen = make("pruned_experts"), make("pruned_experts")
    unseen = unseen._replace(round=(unseen.round[0]._replace(observe=None),))
    outcomes = [run_algorithm(one, tiny_federation(), tmp_path / name) for one, name in ((seen, "a"), (unseen, "b"))]
    one, other = (outcome.fingerprint() for outcome in outcomes)
    assert {key: value for key, value in one.items() if key != "records"} == {
        key: value for key, value in other.items() if key != "records"
    }
    assert not outcomes[1].records[0].experts


# Chosen experts: two exchanges, a different broadcast per client


@pytest.fixture
def chosen(tmp_path: Path) -> Outcome:
    return run_algorithm(make("chosen_experts"), tiny_federation(), tmp_path / "store")


def test_a_client_is_sent_the_experts_that_it_chose(tmp_path: Path) -> None:
    _, spy = run_spied(make("chosen_experts"), tiny_federation(), tmp_path / "store", rounds=1)
    chose = {
        client: messages[0]["experts"].tolist()
        for sent in spy.exchanged
        if (sent.asked["phase"], sent.asked["index"]) == ("round", 0)
        for client, messages in sent.messages.items()
    }
    was_sent = {
        client: decode_tensors(blobs[which])["expert_ids"].tolist()
        for header, blobs in map(wire.unpack, spy.received)
        if (header.get("phase"), header.get("index")) == ("round", 1)
        for client, which in zip(header["clients"], header["broadcast_index"], strict=True)
    }
    assert was_sent.pop(SOME_OPTED_OUT) == [0]  # the anchor: its own expert alone
    assert was_sent == {client: chose[client] for client in was_sent} and len(was_sent) == 3


def test_anchors_and_others_are_trained_in_separate_cohorts() -> None:
    algorithm = make("chosen_experts")
    server = algorithm.init_server(0)
    choice = [algorithm.round[0].update_like(None)]
    broadcasts = {client: algorithm.round[1].broadcast(server, client, choice) for client in PARTICIPANTS}
    messages = Messenger(tiny_parts(algorithm, cohort_size=9), Unused())  # type: ignore[arg-type]
    cohorts = [cohort.clients for cohort in messages.cohorts(broadcasts, algorithm.round[1])]
    assert cohorts == [[SOME_OPTED_OUT], [ONE_RECORD, PLAIN, NO_VALIDATION_IN]]


class Unused:
    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        raise AssertionError("nothing is sent here")


def test_opted_out_clients_receive_every_expert_and_choose_for_themselves(chosen: Outcome) -> None:
    for client in (OPTED_OUT, EMPTY):
        assert chosen.delivered[client].expert_ids.tolist() == list(range(NUM_EXPERTS))
        assert newest(chosen, "final", client)["usable"].sum() == NUM_CHOSEN
        assert str(client) not in chosen.manifest["messages_of_client"]


def test_a_new_client_is_asked_for_its_choice_only(chosen: Outcome) -> None:
    assert len(chosen.delivered[UNSEEN].expert_ids) == NUM_CHOSEN
    assert set(chosen.manifest["messages_of_client"][str(UNSEEN)]) == {"ask"}


def test_the_router_is_sent_once_per_round(chosen: Outcome) -> None:
    received = chosen.manifest["received_by_clients"]
    assert all(name.startswith("router/") for name in received["choose"])
    assert not any(name.startswith("router/") for name in received["train"])


def test_an_expert_that_nobody_trained_keeps_its_weights() -> None:
    algorithm = make("chosen_experts")
    server = algorithm.init_server(0)
    sent = algorithm.round[1].broadcast(
        server, 3, [algorithm.round[0].update_like(None)._replace(experts=torch.tensor([0, 2]))]
    )
    like = algorithm.round[1].update_like(sent)
    update = like._replace(experts={n: t + 1 for n, t in sent.experts.items()}, num_examples=torch.tensor(5.0))
    after = algorithm.round[1].aggregate(server, {3: update}, {}, {3: sent})
    for name, before in server.experts.items():
        torch.testing.assert_close(
            after.experts[name], before + torch.tensor([1.0, 0, 1]).view(-1, *[1] * (before.dim() - 1))
        )


class BadChoice(Around):
    """A transport on whose way the choice of one client gets another shape."""

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            if (asked.get("phase"), asked.get("index")) == ("round", 0):
                reply = with_updates(reply, [PLAIN], lambda _: {"experts": torch.zeros(9, dtype=torch.int64)})
            yield index, reply


def test_who_was_rejected_sits_out_the_rest_of_the_round(tmp_path: Path) -> None:
    outcome = run_algorithm(
        make("chosen_experts"), tiny_federation(), tmp_path / "store", rounds=1, cohort_size=9, through=BadChoice
    )
    assert [(one["exchange"], one["client"]) for one in outcome.manifest["rejected"]] == [("choose", PLAIN)]
    assert "train" not in outcome.manifest["messages_of_client"][str(PLAIN)]
    assert "train" in outcome.manifest["messages_of_client"][str(ONE_RECORD)]


# Private expert: work beside the exchange


def test_private_work_is_stored_whoever_shares_the_cohort(tmp_path: Path) -> None:
    """A client that never took part does not cost the others of its cohort what they learnt."""
    outcome = run_algorithm(make("private_expert"), tiny_federation(), tmp_path / "store", cohort_size=9)
    for client in PARTICIPANTS:
        assert_same(newest(outcome, "final", client), newest(outcome, "personal", client))
    for client in (OPTED_OUT, EMPTY, UNSEEN):
        start = make("private_expert").init_personal(outcome.delivered[client], None, client, 0)  # type: ignore[misc]
        assert_same(newest(outcome, "final", client), trees.to_named(start))


def test_private_work_moves_model_and_gate(tmp_path: Path) -> None:
    outcome = run_algorithm(make("private_expert"), tiny_federation(), tmp_path / "store")
    personal = trees.from_named(PrivatePersonal, newest(outcome, "personal", PLAIN))
    start = tiny_setup().gate.init("gate")
    assert any((personal.gate[name] != start[name]).any() for name in start)
    sent = outcome.manifest["sent_by_clients"]
    assert {name.split("/")[0] for rows in sent.values() for name in rows} == {"gradient"}


def assert_same(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# Pruned experts: bytes that are really not sent, gates that leave only where they are released


def test_an_expert_that_a_client_does_not_use_is_not_sent(tmp_path: Path) -> None:
    pruned, whole = (
        run_algorithm(make("pruned_experts", threshold=t), tiny_federation(), tmp_path / str(t), rounds=3)
        for t in (0.9, 0.0)
    )
    turns = 3 * len(PARTICIPANTS)
    sent_down = [expert_messages(outcome, "received_by_clients") for outcome in (pruned, whole)]
    assert sent_down[1] == {str(k): turns for k in range(3)}
    assert all(len(PARTICIPANTS) <= times < turns for times in sent_down[0].values())
    assert expert_messages(pruned, "sent_by_clients") == sent_down[0]  # who was not sent it does not send it back


def expert_messages(outcome: Outcome, backend: str) -> dict[str, int]:
    rows = outcome.manifest[backend]["train"]
    return {name.split("/")[1]: row["times"] for name, row in sorted(rows.items()) if name.startswith("experts/")}


def test_gates_stay_private_unless_they_are_released(tmp_path: Path) -> None:
    outcome = run_algorithm(make("pruned_experts"), tiny_federation(), tmp_path / "store")
    assert outcome.server.gates == {}
    sent = outcome.manifest["sent_by_clients"]
    assert not any(name.startswith("gates") for rows in sent.values() for name in rows)


def test_a_release_is_in_the_manifest_and_reaches_new_clients(tmp_path: Path) -> None:
    outcome = run_algorithm(make("pruned_experts"), tiny_federation(), tmp_path / "store", release=True)
    released = outcome.manifest["sent_by_clients"]["release gates"]
    assert released and all(name.startswith("gates/") for name in released)
    assert all(row["times"] == len(PARTICIPANTS) for row in released.values())
    gates = [trees.from_named(PrivateGates, newest(outcome, "client", client)).gates for client in PARTICIPANTS]
    for name, mean in outcome.server.gates.items():
        torch.testing.assert_close(mean, torch.stack([one[name] for one in gates]).mean(0))
    assert outcome.delivered[UNSEEN].gates.keys() == outcome.server.gates.keys()


def test_a_private_gate_goes_on_from_where_it_was(tmp_path: Path) -> None:
    outcome = run_algorithm(make("pruned_experts", threshold=0.0), tiny_federation(), tmp_path / "store", rounds=3)
    rows = [row for (kind, client, _), row in sorted(outcome.private.items()) if (kind, client) == ("client", PLAIN)]
    assert len(set(rows)) == 3
