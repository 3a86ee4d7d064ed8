"""Whole frames, in order, of any size; and an end that is gone is noticed."""

import socket
import struct
import threading
import tracemalloc

import pytest

from fedmoe.engines import channel
from fedmoe.engines.channel import FIRST_BYTES, Channel, channel_pair
from fedmoe.errors import MessageError


def test_frames_arrive_whole_and_in_order_even_when_larger_than_what_may_be_on_its_way():
    one, other = channel_pair()
    frames = [b"", b"a", bytes(range(256)) * 40_000]
    sender = threading.Thread(target=lambda: [one.send(frame) for frame in frames])
    sender.start()
    assert [other.receive() for _ in frames] == frames
    sender.join()
    one.close()
    other.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0\0", (10).to_bytes(8, "big") + b"half"])
def test_an_end_that_closes_before_or_within_a_frame_is_the_end(sent):
    one, other = channel_pair()
    one._end.sendall(sent)
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_a_frame_can_be_written_to_so_that_tensors_lie_in_it():
    one, other = channel_pair()
    one.send(b"abc")
    assert isinstance(other.receive(), bytearray)
    one.close()
    other.close()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, channel.MAX_FRAME_BYTES + 1])
def test_a_frame_beyond_the_limit_is_not_received(length):
    one, other = channel_pair()
    one._end.sendall(struct.pack(">Q", length))
    with pytest.raises(MessageError, match=f"a frame of {length} bytes is stated"):
        other.receive()
    one.close()
    other.close()


def test_the_limit_is_the_receivers_choice():
    ends = socket.socketpair()
    one, other = Channel(ends[0]), Channel(ends[1], max_bytes=3)
    one.send(b"abc")
    one.send(b"abcd")
    assert other.receive() == b"abc"
    with pytest.raises(MessageError, match="at most 3"):
        other.receive()
    one.close()
    other.close()


def test_memory_is_taken_for_what_arrives_not_for_what_is_stated():
    one, other = channel_pair()
    one._end.sendall(struct.pack(">Q", channel.MAX_FRAME_BYTES) + b"a few bytes")
    one.close()
    tracemalloc.start()
    with pytest.raises(EOFError):
        other.receive()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    other.close()
    assert peak < 2 * FIRST_BYTES


def test_a_frame_that_outgrows_its_first_room_arrives_whole(monkeypatch):
    monkeypatch.setattr(channel, "FIRST_BYTES", 5)
    one, other = channel_pair()
    for frame in (bytes(range(5)), bytes(range(6)), bytes(range(256)) * 100):
        one.send(frame)
        assert other.receive() == frame
    one.close()
    other.close()
