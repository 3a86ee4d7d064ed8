from pathlib import Path

import pytest

from fedmoe.errors import MessageError
from fedmoe.framing import pack
from fedmoe.silos.journal import KEPT, Journal


class Work:
    def __init__(self) -> None:
        self.done: list[bytes] = []

    def __call__(self, frame: bytes) -> bytes:
        self.done.append(bytes(frame))
        return bytes(pack({"reply": len(self.done)}))


def test_a_message_that_arrives_twice_is_answered_with_the_same_bytes(tmp_path: Path) -> None:
    work = Work()
    journal = Journal(tmp_path / "replies.sqlite")
    first = journal.once(1, b"round 1", work)
    assert journal.once(1, b"round 1", work) == first
    assert journal.once(1, b"round 2", work) != first
    assert work.done == [b"round 1", b"round 2"]


def test_it_is_known_after_the_node_was_killed(tmp_path: Path) -> None:
    work = Work()
    first = Journal(tmp_path / "replies.sqlite").once(1, b"round 1", work)
    assert Journal(tmp_path / "replies.sqlite").once(1, b"round 1", work) == first and len(work.done) == 1


def test_a_resumed_server_is_answered_anew_and_its_earlier_attempt_refused(tmp_path: Path) -> None:
    work = Work()
    journal = Journal(tmp_path / "replies.sqlite")
    journal.begin(1)
    journal.once(1, b"round 1", work)
    journal.begin(2)
    journal.once(2, b"round 1", work)
    assert len(work.done) == 2
    with pytest.raises(MessageError, match="attempt 1 at this run came too late: attempt 2 has begun"):
        journal.begin(1)
    journal.begin(2)


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "replies.sqlite")
    failed = bytes(pack({"error": "RunError", "message": "the disk is full"}))
    assert journal.once(1, b"round 1", lambda _: failed) == failed
    assert journal.once(1, b"round 1", Work()) != failed


def test_only_the_latest_replies_are_kept_for_the_owner_alone(tmp_path: Path) -> None:
    journal, work = Journal(tmp_path / "replies.sqlite"), Work()
    for number in range(3 * KEPT):
        journal.once(1, str(number).encode(), work)
    journal.once(1, str(3 * KEPT - 1).encode(), work)
    assert len(work.done) == 3 * KEPT
    journal.once(1, b"0", work)
    assert len(work.done) == 3 * KEPT + 1
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
