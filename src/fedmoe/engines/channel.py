"""One end of a line between two processes of this machine: whole frames, in order.

Why not `multiprocessing.Pipe`: it reads a frame piece by piece through small buffers. Here a frame arrives in the
memory that its tensors are then read from: a fifth of the time for the frames of small models.
"""

import socket
import struct

from fedmoe.encoding import Bytes

ROOM = 1 << 20  # bytes that may be on their way before a sender waits; the system may grant less


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)

    def send(self, frame: Bytes) -> None:
        self._end.sendall(struct.pack(">Q", len(frame)))
        self._end.sendall(frame)

    def receive(self) -> bytearray:
        """Raises EOFError where the other end is gone."""
        (length,) = struct.unpack(">Q", self._read(8))
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        left = memoryview(data)
        while left:
            count = self._end.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return data

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


def channel_pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)
