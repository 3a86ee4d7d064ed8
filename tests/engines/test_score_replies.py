"""Scores of any bytes: whoever sent them is scored, or rejected with a reason."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.reply_builders import parts_of, with_header
from fedmoe import wire
from fedmoe.engines.frames import Cohort
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.score_replies import read_scores
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.score_message import score_message

CLIENTS = [3, 8]
SCORES = [Score(client, client > 5, "before", data, 0.5, 0.25, 10) for client in CLIENTS for data in ("own", "global")]
HONEST = bytes(
    wire.pack(
        {"reply_to": "score", "groups": [[client] for client in CLIENTS]},
        [wire.encode(score_message([score for score in SCORES if score.client == client])) for client in CLIENTS],
    )
)


def read(frame: bytes) -> tuple[list[Score], Manifest]:
    manifest = Manifest()
    return read_scores(Cohort(CLIENTS, [None, None]), "score", frame, manifest, 7, 5), manifest


def test_honest_scores_are_read_and_counted_apart() -> None:
    scores, manifest = read(HONEST)
    assert scores == SCORES and manifest.rejected == []
    assert list(manifest.as_dict()["score_messages_of_client"]) == ["3", "8"]


@pytest.mark.parametrize("groups", [[[3]], [[3], [3]], [[3], [9]], [[3, 8], [3]], [["3"], [8]], None])
def test_who_has_no_scores_in_a_reply_is_rejected(groups: object) -> None:
    scores, manifest = read(with_header(HONEST, groups=groups))
    rejected = {one["client"] for one in manifest.rejected}
    assert 8 in rejected and rejected | {score.client for score in scores} == set(CLIENTS)


@settings(deadline=None)
@given(st.data())
def test_changed_bytes(data: st.DataObject) -> None:
    frame = bytearray(HONEST)
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for changed in (frame, frame[: data.draw(st.integers(0, len(frame)))]):
        scores, manifest = read(bytes(changed))
        rejected = {one["client"] for one in json.loads(json.dumps(manifest.rejected))}
        assert rejected | {score.client for score in scores} | counted(manifest) == set(CLIENTS)
        assert all(0 <= score.accuracy <= 1 and score.examples > 0 for score in scores)


def counted(manifest: Manifest) -> set[int]:
    """A message may hold no scores at all."""
    return {int(client) for client in manifest.as_dict()["score_messages_of_client"]}


def test_long_messages_are_not_read() -> None:
    header, (first, second) = parts_of(HONEST)
    scores, manifest = read(bytes(wire.pack(header, [[first + bytes(5000)], [second]])))
    assert {score.client for score in scores} == {8} and [one["client"] for one in manifest.rejected] == [3]
