"""What holds for every algorithm on every backend, as functions that raise an AssertionError with a sentence.

What a check needs to know of an algorithm is in its fields, so a new one is checked as it is.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_type_hints

import torch

from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.core_types import ClientId, Tensors
from fedmoe.encoding import decode_tensors
from fedmoe.engines.messenger import FROZEN
from fedmoe.engines.protocol import exchanges_of
from fedmoe.errors import MessageError
from fedmoe.testing.federation import EMPTY, ONE_RECORD, OPTED_OUT, PARTICIPANTS, UNSEEN, tiny_federation
from fedmoe.testing.outcome import Outcome, run_algorithm, run_spied, with_clients_in_other_order
from fedmoe.testing.subject import Subject, require, require_same
from fedmoe.testing.transports import Backwards, Spy

TOLERANCE = 1e-5  # between backends


# One definition, three backends


def backends_agree(subject: Subject, folder: Path) -> None:
    """Clients one by one give what a cohort gives: states, updates and scores."""
    federation = tiny_federation()
    cohort, spied_cohort = run_spied(subject.make(), federation, folder / "cohort", cohort_size=4)
    alone, spied_alone = run_spied(subject.make("sequential"), federation, folder / "sequential", cohort_size=1)
    _require_close(trees.to_named(cohort.server), trees.to_named(alone.server), "the server's state")
    _require_close(cohort.private_tensors(), alone.private_tensors(), "private states")
    _require_close(_updates_of(spied_cohort), _updates_of(spied_alone), "what clients sent")
    require(len(cohort.scores) == len(alone.scores), "the backends give different numbers of scores.")
    for one, other in zip(cohort.scores, alone.scores, strict=True):
        same = one[:4] == other[:4] and abs(one.loss - other.loss) <= TOLERANCE
        require(same, f"a score differs between {subject.backend} and sequential: {one}, {other}.")


def _updates_of(spy: Spy) -> Tensors:
    return {
        f"{sent.asked['phase']} {sent.asked['round']}.{sent.asked['index']}, client {client}: {name}": tensor
        for sent in spy.exchanged
        for client, messages in sent.messages.items()
        for message in messages
        for name, tensor in message.items()
    }


def _require_close(first: Tensors, second: Tensors, what: str) -> None:
    different = sorted(first.keys() ^ second.keys())
    require(not different, f"{what} of the backends have different names: {different[:3]}.")
    for name, tensor in first.items():
        try:
            torch.testing.assert_close(tensor, second[name], atol=TOLERANCE, rtol=TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{what}: {name} differs between backends: {error}") from error


# What leaves a client


def all_exchanges(algorithm: Algorithm) -> list[Exchange]:
    others = [algorithm.validation.exchange] if algorithm.validation else []
    others += [algorithm.release] if algorithm.release else []
    return [*algorithm.round, *algorithm.after_rounds, *algorithm.delivery, *others]


def only_messages_can_be_encoded(subject: Subject, _folder: Path) -> None:
    algorithm = subject.make()
    for exchange in all_exchanges(algorithm):
        for kind in (exchange.broadcast_type, exchange.update_type, exchange.report_type):
            declared = getattr(kind, "may_be_sent", False)
            require(declared, f"{kind.__name__} of the exchange {exchange.name!r} is not declared with @message.")
    for private in (algorithm.client_type, algorithm.personal_type, algorithm.server_type):
        blank = private(*[torch.zeros(1) for _ in get_type_hints(private)])
        try:
            wire.encode(blank)
        except MessageError as error:
            require("not declared as a message" in str(error), f"{private.__name__}: {error}")
        else:
            raise AssertionError(f"{private.__name__} is a state, but declared with @message: it could be sent.")


def no_private_tensor_leaves_a_client(subject: Subject, folder: Path) -> None:
    algorithm = subject.make()
    outcome, spy = run_spied(algorithm, tiny_federation(), folder / "store")
    found = leaked(outcome, spy, algorithm.known_to_server)
    require(not found, f"private tensors are in what clients sent: {found[:3]}.")


def leaked(outcome: Outcome, spy: Spy, known_to_server: Collection[str] = ()) -> list[str]:
    """Names of private tensors whose bytes are in a frame that a worker sent. A few bytes may occur by chance.

    Fields of the client state that the algorithm declares as `known_to_server` are left out.
    """
    declared = tuple(f": {field}/" for field in known_to_server)
    return [
        name
        for name, tensor in outcome.private_tensors().items()
        if tensor.nbytes >= 16 and len(tensor.unique()) > 1
        if not (name.startswith("client of") and any(field in name for field in declared))
        if any(tensor.numpy().tobytes() in sent.frame for sent in spy.sent)
    ]


def the_manifest_counts_what_really_passed(subject: Subject, folder: Path) -> None:
    """Names, times and bytes in the manifest are those of the tensors in the frames, client by client."""
    algorithm = subject.make()
    outcome, spy = run_spied(algorithm, tiny_federation(), folder / "store")

    def exchange_of(asked: dict[str, Any]) -> Exchange:
        exchange: Exchange = exchanges_of(algorithm, asked["phase"])[asked["index"]]
        return exchange

    up, of_client, down = Counter[str](), Counter[ClientId](), Counter[str]()
    for sent in spy.exchanged:
        for client, (update, report) in sent.messages.items():
            of_update = wire.by_expert(exchange_of(sent.asked).update_type, update)
            up.update(of_update.keys() | {f"report:{name}" for name in report})
            of_client[client] += sum(tensor.nbytes for tensor in (*update.values(), *report.values()))
    for header, blobs in map(wire.unpack, spy.received):
        for which in header["broadcast_index"] if header["do"] == "exchange" else ():
            down.update(wire.by_expert(exchange_of(header).broadcast_type, decode_tensors(blobs[which])).keys())
    for delivered in outcome.delivered.values():
        down.update(wire.by_expert(type(delivered), trees.to_named(delivered)).keys())

    manifest = outcome.manifest
    require(up == _times(manifest["sent_by_clients"]), "the manifest does not list what clients sent.")
    received = dict(manifest["received_by_clients"])
    frozen = received.pop(FROZEN, {})  # public constants, which a node has: they are counted once for each client
    require(down == _times(received), "the manifest does not list what clients received.")
    times = {name: row["times"] for name, row in frozen.items()}
    once = {f"constants/{name}": len(outcome.delivered) for name in algorithm.constants}
    require(times == once, f"constants are to be counted once for each client, but are counted so: {times}.")
    counted = {int(c): sum(row["bytes"] for row in rows.values()) for c, rows in manifest["messages_of_client"].items()}
    require(of_client == counted, f"clients sent {dict(of_client)} bytes, the manifest has {counted}.")
    total = sum(row["bytes"] for rows in manifest["sent_by_clients"].values() for row in rows.values())
    require(
        sum(of_client.values()) == total, f"clients sent {sum(of_client.values())} bytes, the manifest has {total}."
    )


def _times(table: dict[str, dict[str, dict[str, Any]]]) -> Counter[str]:
    counted = Counter[str]()
    for rows in table.values():
        counted.update({name: row["times"] for name, row in rows.items()})
    return counted


# Same seed, same result


def workers_and_order_change_nothing(subject: Subject, folder: Path) -> None:
    algorithm, federation = subject.make(), tiny_federation()
    options: dict[str, Any] = {"cohort_size": 2}
    alone = run_algorithm(algorithm, federation, folder / "alone", **options).fingerprint()
    many = run_algorithm(algorithm, federation, folder / "many", workers=3, **options)
    require_same(many.fingerprint(), alone, "three workers give another result than one")
    reordered = with_clients_in_other_order(algorithm)
    other = run_algorithm(reordered, federation, folder / "order", through=Backwards, **options)
    require_same(other.fingerprint(), alone, "another order of clients and replies gives another result")


def the_seed_decides_the_result(subject: Subject, folder: Path) -> None:
    first, again, other = (
        run_algorithm(subject.make(), tiny_federation(), folder / str(number), seed=seed).fingerprint()
        for number, seed in enumerate((0, 0, 1))
    )
    require_same(first, again, "the same seed gives another result: is a global generator in use?")
    require(first["scores"] != other["scores"], "another seed gives the same scores: the seed is not used.")
    ends_differ = first["private"] != other["private"] or not subject.make().personalize
    require(ends_differ, "another seed gives the same personal states: the seed is not used.")


# Clients with little, and clients that opted out


def small_and_opted_out_clients_end_with_a_model(subject: Subject, folder: Path) -> None:
    algorithm = subject.make()
    outcome = run_algorithm(algorithm, tiny_federation(), folder / "store", rounds=3)
    before = {"before"} if algorithm.round or not algorithm.personalize else set()
    models = before | ({"after"} if algorithm.personalize else set())
    for client in (ONE_RECORD, OPTED_OUT, EMPTY):
        scores = [score for score in outcome.scores if score.client == client]
        found = {score.model for score in scores}
        require(found == models, f"client {client} has scores of {sorted(found)}, not of {sorted(models)}.")
        finite = all(torch.tensor(score.loss).isfinite() for score in scores)
        require(finite, f"client {client}, with next to no data, ends with a loss that is not finite: {scores}.")
    senders = {int(client) for client in outcome.manifest["messages_of_client"]}
    require(senders <= {*PARTICIPANTS, UNSEEN}, f"clients {sorted(senders)} sent something; some of them opted out.")


def a_new_client_without_data_is_scored_on_pooled_examples(subject: Subject, folder: Path) -> None:
    """With nothing of its own it may need what others release; the others are not changed by it."""
    algorithm = subject.make()
    options: dict[str, Any] = {"release": algorithm.release is not None}
    pooled = with_pooled_client(tiny_federation(), 100, seed=0)
    outcome = run_algorithm(algorithm, pooled, folder / "store", **options)
    alone = run_algorithm(algorithm, tiny_federation(), folder / "alone", **options)
    added = [score for score in outcome.scores if score.client == UNSEEN + 1]
    require({score.data for score in added} == {"pooled", "global"}, f"the new client has other scores: {added}.")
    require(all(score.unseen for score in added), f"the new client counts as one that trained: {added}.")
    counts = {score.examples for score in added if score.data == "pooled"}
    require(counts == {6}, f"the new client is scored on {counts} examples, not on the 6 that opted in.")
    sampled = [[record.clients for record in one.records] for one in (outcome, alone)]
    require(sampled[0] == sampled[1], "a new client that never trains changes who is sampled.")
    others = [score[:4] for score in outcome.scores if score.client <= UNSEEN]
    require(others == [score[:4] for score in alone.scores], "a new client changes which scores the others have.")


def one_record_is_enough_to_take_part(subject: Subject, folder: Path) -> None:
    outcome = run_algorithm(subject.make(), tiny_federation(), folder / "store", rounds=3)
    took_part = any(ONE_RECORD in record.clients for record in outcome.records)
    require(took_part, f"client {ONE_RECORD}, which opted in with one record, was never sampled in 3 rounds.")
    sent = str(ONE_RECORD) in outcome.manifest["messages_of_client"]
    require(sent, f"client {ONE_RECORD}, which has one record, sent nothing that was accepted.")
    rejected = outcome.manifest["rejected"]
    require(rejected == [], f"updates of honest clients were rejected: {rejected[:2]}.")
