"""One contract for every algorithm, present and future: those of the catalog, and probes of what is to come."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import (
    CLASSES,
    EMPTY,
    FEATURES,
    NO_VALIDATION_IN,
    ONE_RECORD,
    OPTED_OUT,
    PARTICIPANTS,
    PLAIN,
    SOME_OPTED_OUT,
    UNSEEN,
    Around,
    Backwards,
    Outcome,
    Spy,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_records,
    tiny_setup,
    with_clients_in_other_order,
    with_records,
    with_updates,
)
from contract.probes import PROBES
from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.core_types import ClientId, Examples, Tensors
from fedmoe.encoding import decode_tensors
from fedmoe.engines.protocol import Transport, exchanges_of
from fedmoe.errors import MessageError
from fedmoe.training.backends import Backend

ENTRIES = CATALOG | PROBES
TALKATIVE = [name for name, entry in ENTRIES.items() if entry.factory(entry.config(), tiny_setup()).round]

every_algorithm = pytest.mark.parametrize("name", ENTRIES)
every_algorithm_that_sends = pytest.mark.parametrize("name", TALKATIVE)


def make(name: str, backend: Backend | None = None) -> Algorithm:
    entry = ENTRIES[name]
    return entry.factory(entry.config(), tiny_setup(backend or current_backend[0]))


current_backend: list[Backend] = ["batched"]


@pytest.fixture(autouse=True, params=["batched", "native"])
def every_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The whole contract holds on the general path and on the native kernels."""
    current_backend[0] = request.param
    yield
    current_backend[0] = "batched"


def exchanges(algorithm: Algorithm) -> list[Exchange]:
    others = [algorithm.validation.exchange] if algorithm.validation else []
    others += [algorithm.release] if algorithm.release else []
    return [*algorithm.round, *algorithm.after_rounds, *algorithm.delivery, *others]


# One definition, three backends


@every_algorithm
def test_batched_and_native_equal_sequential(name: str, tmp_path: Path) -> None:
    federation = tiny_federation()
    batched, spied_batched = run_spied(make(name), federation, tmp_path / "batched", cohort_size=4)
    sequential, spied_sequential = run_spied(
        make(name, "sequential"), federation, tmp_path / "sequential", cohort_size=1
    )

    assert_close(trees.to_named(batched.server), trees.to_named(sequential.server))
    assert_close(batched.private_tensors(), sequential.private_tensors())
    assert_close(updates_of(spied_batched), updates_of(spied_sequential))
    for one, other in zip(batched.scores, sequential.scores, strict=True):
        assert one[:4] == other[:4]
        assert one.loss == pytest.approx(other.loss, abs=1e-5)


def updates_of(spy: Spy) -> Tensors:
    return {
        f"{sent.asked['phase']} {sent.asked['round']}.{sent.asked['index']}, client {client}: {name}": tensor
        for sent in spy.exchanged
        for client, messages in sent.messages.items()
        for message in messages
        for name, tensor in message.items()
    }


def assert_close(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=1e-5, rtol=1e-5, msg=lambda why, n=name: f"{n}: {why}")


# What leaves a client


@every_algorithm
def test_only_messages_can_be_encoded(name: str) -> None:
    algorithm = make(name)
    for exchange in exchanges(algorithm):
        for kind in (exchange.broadcast_type, exchange.update_type, exchange.report_type):
            assert getattr(kind, "may_be_sent", False), f"{kind.__name__} of {exchange.name} is not declared"
    for private in (algorithm.client_type, algorithm.personal_type, algorithm.server_type):
        blank = private(*[torch.zeros(1) for _ in get_type_hints(private)])
        with pytest.raises(MessageError, match="not declared as a message"):
            wire.encode(blank)


@every_algorithm
def test_no_private_tensor_leaves_a_client(name: str, tmp_path: Path) -> None:
    outcome, spy = run_spied(make(name), tiny_federation(), tmp_path / "store")
    assert leaked(outcome, spy) == []


def test_a_private_tensor_that_leaves_is_seen(tmp_path: Path) -> None:
    """The test above can fail: here the personal model is what FedAvg sends."""
    algorithm = make("fedavg")
    leaky = algorithm._replace(
        personal_type=algorithm.round[0].update_type,
        init_personal=lambda broadcast, *_: algorithm.round[0].update_like(broadcast),
        round=(algorithm.round[0]._replace(private_update=same_as_sent(algorithm.round[0])),),
    )
    outcome, spy = run_spied(leaky, tiny_federation(), tmp_path / "store")
    assert leaked(outcome, spy)


def same_as_sent(exchange: Exchange) -> Callable[..., Any]:
    def private_update(broadcast: Any, client: Any, _personal: Any, data: Any, rng: Any) -> Any:
        opted_in = tiny_federation().data(rng.clients, opted_in_only=True)
        return exchange.local_update(broadcast, client, opted_in, rng._replace(scope="round:train"))[1]

    return private_update


def leaked(outcome: Outcome, spy: Spy) -> list[str]:
    """Names of private tensors whose bytes are in a frame that a worker sent. A few bytes may occur by chance."""
    return [
        name
        for name, tensor in outcome.private_tensors().items()
        if tensor.nbytes >= 16 and len(tensor.unique()) > 1
        if any(tensor.numpy().tobytes() in sent.frame for sent in spy.sent)
    ]


def exchange_of(algorithm: Algorithm, asked: dict[str, Any]) -> Exchange:
    return exchanges_of(algorithm, asked["phase"])[asked["index"]]


@every_algorithm
def test_the_manifest_counts_what_really_passed(name: str, tmp_path: Path) -> None:
    """Names, times and bytes in the manifest are those of the tensors in the frames, client by client."""
    algorithm = make(name)
    outcome, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store")
    up, of_client, down = Counter[str](), Counter[ClientId](), Counter[str]()
    for sent in spy.exchanged:
        for client, (update, report) in sent.messages.items():
            up.update(
                wire.by_expert(exchange_of(algorithm, sent.asked).update_type, update).keys()
                | {f"report:{name}" for name in report}
            )
            of_client[client] += sum(tensor.nbytes for tensor in (*update.values(), *report.values()))
    for header, blobs in map(wire.unpack, spy.received):
        for which in header["broadcast_index"] if header["do"] == "exchange" else ():
            kind = exchange_of(algorithm, header).broadcast_type
            down.update(wire.by_expert(kind, decode_tensors(blobs[which])).keys())
    for kept in outcome.delivered.values():
        down.update(wire.by_expert(type(kept), trees.to_named(kept)).keys())

    assert up == times(outcome.manifest["sent_by_clients"])
    assert down == times(outcome.manifest["received_by_clients"])
    counted = outcome.manifest["messages_of_client"]
    assert of_client == {int(c): sum(row["bytes"] for row in rows.values()) for c, rows in counted.items()}
    assert sum(of_client.values()) == total_bytes(outcome.manifest["sent_by_clients"])


def times(table: dict[str, dict[str, dict[str, Any]]]) -> Counter[str]:
    counted = Counter[str]()
    for rows in table.values():
        counted.update({name: row["times"] for name, row in rows.items()})
    return counted


def total_bytes(table: dict[str, dict[str, dict[str, Any]]]) -> int:
    return sum(row["bytes"] for rows in table.values() for row in rows.values())


# Opt-out is non-interference

VALUES = st.floats(width=32) | st.sampled_from([0.0, 1e30, float("nan"), float("inf")])
OptedOut = list[tuple[int, tuple[float, ...], int]]  # where among the records, values, label
RECORDS_OUT = st.lists(
    st.tuples(st.integers(0, 9), st.tuples(*[VALUES] * FEATURES), st.integers(0, CLASSES - 1)), max_size=4
)


def rewritten(plain: Records, train: OptedOut, validation: OptedOut) -> Records:
    """The same opted-in records; other opted-out ones, any number of them, anywhere between."""
    new_train, train_in = with_opted_out(plain.train, plain.train_opted_in, train)
    new_validation, validation_in = with_opted_out(plain.validation, plain.validation_opted_in, validation)
    return Records(new_train, new_validation, plain.test, train_in, validation_in)


def with_opted_out(rows: Examples, opted_in: Tensor, others: OptedOut) -> tuple[Examples, Tensor]:
    kept = [(x, y, True) for x, y in zip(rows.x[opted_in], rows.y[opted_in], strict=True)]
    for place, values, label in others:
        kept.insert(place, (torch.tensor(values, dtype=torch.float32), torch.tensor(label), False))
    x = torch.stack([x for x, _, _ in kept]) if kept else rows.x[:0]
    y = torch.tensor([int(y) for _, y, _ in kept], dtype=torch.int64)
    return examples(x, y), torch.tensor([flag for _, _, flag in kept], dtype=torch.bool)


@every_algorithm_that_sends
def test_opted_out_records_change_no_byte_sent(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    algorithm, plain = make(name), tiny_records()
    before = bytes_sent(algorithm, tiny_federation(), tmp_path_factory.mktemp("run"))
    touched = (SOME_OPTED_OUT, OPTED_OUT, NO_VALIDATION_IN)

    @settings(max_examples=10, deadline=None, database=None)
    @given(st.tuples(*[st.tuples(RECORDS_OUT, RECORDS_OUT)] * len(touched)))
    def changes_no_byte(others: tuple[tuple[OptedOut, OptedOut], ...]) -> None:
        changed = {client: rewritten(plain[client], *o) for client, o in zip(touched, others, strict=True)}
        federation = with_records(tiny_federation(), changed)
        assert bytes_sent(algorithm, federation, tmp_path_factory.mktemp("run")) == before

    changes_no_byte()


@every_algorithm_that_sends
def test_opted_in_records_change_bytes_sent(name: str, tmp_path: Path) -> None:
    """So the property above is not true of everything."""
    plain = tiny_records()[SOME_OPTED_OUT]
    x = plain.train.x.clone()
    x[plain.train_opted_in] += 0.5
    changed = {SOME_OPTED_OUT: plain._replace(train=plain.train._replace(x=x))}
    sent = [
        bytes_sent(make(name), federation, tmp_path / str(number))
        for number, federation in enumerate((tiny_federation(), with_records(tiny_federation(), changed)))
    ]
    assert sent[0] != sent[1]


def bytes_sent(algorithm: Algorithm, federation: Federation, folder: Path) -> list[bytes]:
    """Every reply to an exchange of rounds, validation, release and delivery."""
    unpersonalised = algorithm._replace(personalize=None)
    _, spy = run_spied(unpersonalised, federation, folder / "store", release=algorithm.release is not None)
    return [sent.frame for sent in spy.exchanged]


# Same seed, same result


@every_algorithm
def test_workers_and_order_change_nothing(name: str, tmp_path: Path) -> None:
    algorithm, federation = make(name), tiny_federation()
    options = {"cohort_size": 2}
    alone = run_algorithm(algorithm, federation, tmp_path / "alone", **options).fingerprint()

    for workers in (2, 3):
        many = run_algorithm(algorithm, federation, tmp_path / str(workers), workers=workers, **options)
        assert many.fingerprint() == alone, f"{workers} workers"
    other_order = run_algorithm(
        with_clients_in_other_order(algorithm), federation, tmp_path / "order", through=Backwards, **options
    )
    assert other_order.fingerprint() == alone


@every_algorithm
def test_same_seed_same_result_other_seed_other_result(name: str, tmp_path: Path) -> None:
    first, again, other = (
        run_algorithm(make(name), tiny_federation(), tmp_path / str(number), seed=seed).fingerprint()
        for number, seed in enumerate((0, 0, 1))
    )
    assert first == again
    assert first["scores"] != other["scores"]
    assert first["private"] != other["private"] or not make(name).personalize


# Clients with little, and clients that say nothing


@every_algorithm
def test_small_and_opted_out_clients_end_with_a_model(name: str, tmp_path: Path) -> None:
    algorithm = make(name)
    outcome = run_algorithm(algorithm, tiny_federation(), tmp_path / "store", rounds=3)
    for client in (ONE_RECORD, OPTED_OUT, EMPTY):
        scores = [score for score in outcome.scores if score.client == client]
        models = {"before"} if algorithm.round else set()
        assert {score.model for score in scores} == models | ({"after"} if algorithm.personalize else set())
        assert all(torch.tensor(score.loss).isfinite() for score in scores)
    assert {int(client) for client in outcome.manifest["messages_of_client"]} <= {*PARTICIPANTS, UNSEEN}


@every_algorithm
def test_a_new_client_without_data_is_scored_on_pooled_validation_examples(name: str, tmp_path: Path) -> None:
    """With nothing of its own it may need what others give away."""
    algorithm = make(name)
    options = {"release": algorithm.release is not None}
    outcome = run_algorithm(
        algorithm, with_pooled_client(tiny_federation(), 100, seed=0), tmp_path / "store", **options
    )
    alone = run_algorithm(algorithm, tiny_federation(), tmp_path / "alone", **options)
    added = [score for score in outcome.scores if score.client == UNSEEN + 1]
    assert {score.data for score in added} == {"pooled", "global"} and all(score.unseen for score in added)
    assert {score.examples for score in added if score.data == "pooled"} == {6}
    assert [record.clients for record in outcome.records] == [record.clients for record in alone.records]
    assert [score[:4] for score in outcome.scores if score.client <= UNSEEN] == [score[:4] for score in alone.scores]


@every_algorithm_that_sends
def test_one_record_is_enough_to_take_part(name: str, tmp_path: Path) -> None:
    outcome = run_algorithm(make(name), tiny_federation(), tmp_path / "store", rounds=3)
    assert any(ONE_RECORD in record.clients for record in outcome.records)
    assert str(ONE_RECORD) in outcome.manifest["messages_of_client"]
    assert outcome.manifest["rejected"] == []


# A bad client


class Tamper(Around):
    """A transport on whose way one client's updates of the rounds are changed."""

    def __init__(self, inner: Transport, client: ClientId, change: Callable[[Tensors], Tensors]) -> None:
        super().__init__(inner)
        self.client, self.change = client, change

    def run(self, frames: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        for index, reply in self.inner.run(frames):
            asked = wire.unpack(frames[index])[0]
            yield index, self.tampered(reply) if asked.get("phase") == "round" else reply

    def tampered(self, reply: bytes) -> bytes:
        return with_updates(reply, [self.client], self.change)


def with_nan(update: Tensors) -> Tensors:
    return {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in update.items()}


def with_other_shape(update: Tensors) -> Tensors:
    return {name: tensor[None].clone() for name, tensor in update.items()}


def with_other_name(update: Tensors) -> Tensors:
    return {f"my_{name}": tensor for name, tensor in update.items()}


TAMPERINGS = {"NaN": with_nan, "not torch": with_other_shape, "my_": with_other_name}


@every_algorithm_that_sends
@pytest.mark.parametrize("reason", TAMPERINGS)
def test_a_bad_update_is_refused_and_the_round_goes_on(name: str, reason: str, tmp_path: Path) -> None:
    bad, algorithm = PLAIN, make(name)._replace(sample=lambda _server, _round, pool, _rng: pool)
    outcome = run_algorithm(
        algorithm,
        tiny_federation(),
        tmp_path / "store",
        rounds=1,
        through=lambda inner: Tamper(inner, bad, TAMPERINGS[reason]),
    )
    (refusal,) = outcome.manifest["rejected"]
    assert (refusal["round"], refusal["client"]) == (1, bad)
    assert reason in refusal["reason"]
    assert outcome.records[0].rejected == 1
    (exchange,) = [one for one in algorithm.round if one.name == refusal["exchange"]]
    accepted = outcome.manifest["messages_of_client"]
    assert all(exchange.name in accepted[str(client)] for client in PARTICIPANTS if client != bad)
    assert exchange.name not in accepted.get(str(bad), {})
    assert all(tensor.isfinite().all() for tensor in server_weights(outcome))
    assert {score.client for score in outcome.scores} == set(range(UNSEEN + 1))


def server_weights(outcome: Outcome) -> list[Tensor]:
    return [
        tensor for tree in outcome.delivered.values() for tensor in trees.leaves(tree) if tensor.is_floating_point()
    ]
