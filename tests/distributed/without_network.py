"""Run a command where there is no network but loopback; where the system does not allow that, with its network.

    python without_network.py python -m pytest tests/distributed

`make slow` runs all tests of Ray and Flower so: nothing of it needs, or quietly uses, another machine.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

CUT_OFF = "FEDMOE_TESTS_WITHOUT_NETWORK"  # environment variable: set in what is run so
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(end, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(end, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def can_cut_the_network() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-rn", "true"]).returncode == 0


def main() -> None:
    if CUT_OFF in os.environ:
        bring_loopback_up()
        os.execvp(sys.argv[1], sys.argv[1:])
    if can_cut_the_network():
        os.environ[CUT_OFF] = "1"
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
