"""Run tests where only the loopback interface is: `unshare -rn python without_network.py TEST...`."""

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(end, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(end, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


if __name__ == "__main__":
    bring_loopback_up()
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", *sys.argv[1:]]
    os.execv(pytest[0], pytest)
