"""Each client that was asked is accepted, or rejected with a reason, whatever came back."""

import json

import pytest
import torch
from safetensors.torch import save

from builders import PARTICIPANTS
from engines.reply_builders import (
    ASKED,
    Asked,
    fedavg_asked,
    fedmix_asked,
    packed,
    parts_of,
    tensors_in,
    validation_asked,
    with_header,
    with_tensors,
)
from fedmoe import trees, wire
from fedmoe.engines.frames import Cohort
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.replies import (
    MAX_REASON,
    NO_REPLY,
    Reply,
    read_header,
    read_replies,
    reported_error,
    sort_replies,
)
from fedmoe.engines.update_checks import UpdateLimits
from fedmoe.errors import ConfigError, MessageError, RunError

FIRST, *REST = PARTICIPANTS
NOT_ASKED = 77


@pytest.fixture(scope="module")
def fedavg() -> Asked:
    return fedavg_asked()


@pytest.fixture(scope="module", params=[fedavg_asked, fedmix_asked, validation_asked])
def asked(request: pytest.FixtureRequest) -> Asked:
    return request.param()  # type: ignore[no-any-return]


def reasons(replies: dict[int, Reply]) -> list[str | None]:
    assert list(replies) == list(PARTICIPANTS)
    assert all(reply == Reply(reply.rejection) for reply in replies.values() if reply.rejection)
    return [reply.rejection for reply in replies.values()]


def test_honest_replies_are_accepted_and_counted(asked: Asked) -> None:
    manifest = Manifest()
    replies = asked.read(asked.frame, manifest)
    assert reasons(replies) == [None] * len(PARTICIPANTS)
    for client, sent in tensors_in(asked.frame).items():
        read = trees.to_named({"update": replies[client].update, "report": replies[client].report})
        assert read.keys() == sent.keys() and all(torch.equal(read[name], sent[name]) for name in sent)
    assert {int(client) for client in manifest.as_dict()["messages_of_client"]} == set(PARTICIPANTS)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"noise",
        bytes(1000),
        (2**60).to_bytes(8, "big"),
        bytes(wire.pack({})),
        bytes(wire.pack({"groups": []})),
        bytes(wire.pack({"reply_to": ASKED})),
        bytes(wire.pack({"reply_to": [ASKED], "groups": []})),
        *(bytes(wire.pack({"reply_to": ASKED, "groups": groups})) for groups in (None, 1, "0", {}, [0], [[]], [["0"]])),
        *(bytes(wire.pack({"reply_to": ASKED, "groups": groups})) for groups in ([[True]], [[0.0]], [[None]], [[[0]]])),
    ],
)
def test_what_is_no_reply_rejects_everyone_it_should_be_of(fedavg: Asked, frame: bytes) -> None:
    manifest = Manifest()
    found = reasons(fedavg.read(frame, manifest))
    assert all(found) and len(set(found)) == 1
    assert manifest.as_dict() == Manifest().as_dict()


def test_a_reply_to_another_question_is_rejected(asked: Asked) -> None:
    found = reasons(asked.read(with_header(asked.frame, reply_to="round:1:0")))
    assert found == ["it replied to 'round:1:0', not to 'round:2:0'"] * len(PARTICIPANTS)


def test_who_is_missing_did_not_reply(asked: Asked) -> None:
    header, blobs = parts_of(asked.frame)
    first = with_header(packed(header, blobs[:1]), groups=header["groups"][:1])
    here = header["groups"][0]
    replies = asked.read(first)
    assert all((replies[client].rejection is None) == (client in here) for client in PARTICIPANTS)
    assert all(replies[client] == NO_REPLY for client in PARTICIPANTS if client not in here)
    nobody = asked.read(packed({"reply_to": ASKED, "groups": []}, []))
    assert reasons(nobody) == ["it did not reply"] * len(PARTICIPANTS)


def alone(asked: Asked, client: int) -> tuple[Asked, bytes]:
    """The same exchange with one client asked, and its reply."""
    index = asked.cohort.clients.index(client)
    rows = {name: leaf[None].contiguous() for name, leaf in tensors_in(asked.frame)[client].items()}
    frame = packed({"reply_to": ASKED, "groups": [[client]]}, [save(rows)])
    return asked._replace(cohort=Cohort([client], [asked.cohort.broadcasts[index]])), frame


def test_nobody_replies_for_another(asked: Asked) -> None:
    """Client 3 is asked, and says that it is client 0."""
    one, frame = alone(asked, 3)
    manifest = Manifest()
    assert one.read(frame)[3].rejection is None
    replies = one.read(with_header(frame, groups=[[0]]), manifest)
    assert replies == {3: Reply("it did not reply; client 0, which was not asked, did")}
    assert manifest.as_dict()["messages_of_client"] == {}


def test_a_group_with_someone_who_was_not_asked_is_rejected_and_others_are_not(fedavg: Asked) -> None:
    sent = tensors_in(fedavg.frame)

    def message(*clients: int) -> bytes:
        return save({name: torch.stack([sent[c][name] for c in clients]) for name in sent[FIRST]})

    groups = [[FIRST, NOT_ASKED], REST]
    frame = packed({"reply_to": ASKED, "groups": groups}, [message(FIRST, FIRST), message(*REST)])
    first, *rest = reasons(fedavg.read(frame))
    assert first == f"it replied together with client {NOT_ASKED}, which was not asked" and not any(rest)


def test_who_is_named_twice_is_rejected_and_counted_nowhere(fedavg: Asked) -> None:
    sent = tensors_in(fedavg.frame)
    double = save({name: torch.stack([sent[FIRST][name]] * 2) for name in sent[FIRST]})
    rest = save({name: torch.stack([sent[c][name] for c in REST]) for name in sent[FIRST]})
    single = save({name: tensor[None].contiguous() for name, tensor in sent[FIRST].items()})
    for groups, blobs in (
        ([[FIRST, FIRST], REST], [double, rest]),
        ([[FIRST], REST, [FIRST]], [single, rest, single]),
    ):
        manifest = Manifest()
        first, *others = reasons(fedavg.read(packed({"reply_to": ASKED, "groups": groups}, blobs), manifest))
        assert first == "it is named 2 times in one reply" and not any(others)
        assert {int(client) for client in manifest.as_dict()["messages_of_client"]} == set(REST)


def test_messages_and_groups_are_as_many(asked: Asked) -> None:
    header, blobs = parts_of(asked.frame)
    for frame in (packed(header, blobs[1:]), packed(header, [*blobs, blobs[0]])):
        assert all("messages for" in (reason or "") for reason in reasons(asked.read(frame)))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("out of memory", "its node reported: out of memory"),
        ("\x1b[31mred\n\ud800", "its node reported: ?[31mred??"),
        (None, "its node reported: None"),
        (["a"], "its node reported: ['a']"),
        ("x" * 10_000, "its node reported: xxx"),
    ],
)
def test_a_node_that_reports_an_error_is_rejected_with_its_words(fedavg: Asked, message: object, shown: str) -> None:
    found = reasons(fedavg.read(packed({"error": "RunError", "message": message}, [])))
    assert all(reason and reason.startswith(shown) and len(reason) <= MAX_REASON for reason in found)
    json.dumps(found).encode()


def test_long_names_make_no_long_reasons(fedavg: Asked) -> None:
    frame = with_tensors(fedavg.frame, lambda named: {**named, "update/" + "x" * 5000: torch.zeros(4)})
    assert all(reason and len(reason) <= MAX_REASON and reason.isprintable() for reason in reasons(fedavg.read(frame)))


def test_a_message_far_longer_than_what_was_asked_for_is_not_even_read(
    fedavg: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, (blob,) = parts_of(fedavg.frame)
    monkeypatch.setattr(wire, "decode_reply", lambda _: pytest.fail("it was read"))
    found = reasons(fedavg.read(packed(header, [blob + bytes(2 << 20)])))
    assert all("far more than what it was asked for" in (reason or "") for reason in found)


# What the algorithm itself checks


def test_an_error_in_the_algorithms_own_check_rejects_that_client(fedavg: Asked) -> None:
    def stumbles(update: object, _broadcast: object) -> str | None:
        stumbles.calls += 1  # type: ignore[attr-defined]
        return None if stumbles.calls > 1 else {}["missing"]  # type: ignore[attr-defined]

    stumbles.calls = 0  # type: ignore[attr-defined]
    manifest = Manifest()
    strict = fedavg._replace(exchange=fedavg.exchange._replace(rejection=stumbles))
    first, *rest = reasons(strict.read(fedavg.frame, manifest))
    assert first == "KeyError: 'missing'" and not any(rest)
    assert {int(client) for client in manifest.as_dict()["messages_of_client"]} == set(REST)


def test_an_error_in_what_is_expected_rejects_everyone(fedavg: Asked) -> None:
    broken = fedavg._replace(exchange=fedavg.exchange._replace(update_like=lambda _: 1 / 0))
    assert reasons(broken.read(fedavg.frame)) == ["ZeroDivisionError: division by zero"] * len(PARTICIPANTS)


def test_limits_reach_the_checks(asked: Asked) -> None:
    assert any(reasons(asked.read(asked.frame, max_value=1e-12)))
    assert any(reasons(asked.read(asked.frame, max_examples=0.5)))


# Sorted, and other frames


def test_rejections_are_written_down_in_the_order_of_clients_with_their_reasons(fedavg: Asked) -> None:
    manifest = Manifest()
    replies = {3: NO_REPLY, 1: Reply("it lacks 'w'"), 2: Reply(None, "update", "report")}
    sorted_replies = sort_replies(fedavg.exchange, 5, replies, {1: "a", 2: "b", 3: "c"}, manifest)
    assert sorted_replies == ({2: "update"}, {2: "report"}, {2: "b"}, {1: "it lacks 'w'", 3: "it did not reply"})
    assert manifest.rejected == [
        {"round": 5, "exchange": "train", "client": 1, "reason": "it lacks 'w'"},
        {"round": 5, "exchange": "train", "client": 3, "reason": "it did not reply"},
    ]


def test_an_error_of_our_own_worker_is_read_back() -> None:
    error = reported_error(wire.pack({"error": "ConfigError", "message": "odd"}))
    assert type(error) is ConfigError and str(error) == "odd"
    assert type(reported_error(wire.pack({"error": "Unheard", "message": "odd"}))) is RunError
    for other in (b"noise", wire.pack({"clients": []}), wire.pack({"error": 1, "message": "odd"})):
        assert reported_error(other) is None


def test_the_header_of_a_reply_has_the_fields_that_are_asked_for() -> None:
    frame = wire.pack({"clients": [1], "more": 2})
    assert read_header(frame) == read_header(frame, clients=list) == {"clients": [1], "more": 2}
    for wrong in (wire.pack({}), wire.pack({"clients": 1}), b"noise"):
        with pytest.raises(MessageError):
            read_header(wrong, clients=list)


def test_a_cohort_of_nobody_has_no_replies(fedavg: Asked) -> None:
    assert read_replies(fedavg.exchange, Cohort([], []), ASKED, b"noise", Manifest(), UpdateLimits()) == {}
