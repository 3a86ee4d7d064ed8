"""Whole frames, in order, of any size; and an end that is gone is noticed."""

import threading

import pytest

from fedmoe.engines.channel import channel_pair


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
