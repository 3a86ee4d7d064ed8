"""One end of a line between two processes of this machine: whole frames, in order.

Why not `multiprocessing.Pipe`: it reads a frame piece by piece through small buffers. Here a frame arrives in the
memory that its tensors are then read from: a fifth of the time for the frames of small models.
"""

import socket
import struct

from fedmoe.errors import MessageError
from fedmoe.framing import Bytes

ROOM = 1 << 20  # bytes that may be on their way before a sender waits; the system may grant less
MAX_FRAME_BYTES = 16 << 30  # a frame of 16 GiB holds a hundred models of forty million weights
FIRST_BYTES = 16 << 20  # set aside for a frame before any of it is there


class Channel:
    """`max_bytes` is the longest frame that is received; memory grows with what arrives, not with the stated length."""

    def __init__(self, end: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._end, self._max_bytes = end, max_bytes
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)

    def send(self, frame: Bytes) -> None:
        self._end.sendall(struct.pack(">Q", len(frame)))
        self._end.sendall(frame)

    def receive(self) -> bytearray:
        """Raises EOFError where the other end is gone, MessageError for a frame that is too long."""
        (length,) = struct.unpack(">Q", self._read(8))
        if length > self._max_bytes:
            raise MessageError(f"a frame of {length} bytes is stated, but at most {self._max_bytes} are received.")
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data, filled = bytearray(min(length, FIRST_BYTES)), 0
        while filled < length:
            if filled == len(data):
                data += bytes(min(length - filled, filled))
            filled += self._fill(memoryview(data)[filled:])
        return data

    def _fill(self, room: memoryview) -> int:
        size = len(room)
        while room:
            count = self._end.recv_into(room)
            if not count:
                raise EOFError
            room = room[count:]
        return size

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


def channel_pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)
