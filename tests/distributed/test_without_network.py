"""With the network cut off except loopback, everything still runs: `make slow` runs the tests of this folder so."""

import os
import socket

import pytest

from distributed.without_network import CUT_OFF

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    CUT_OFF not in os.environ, reason="the network is there: run tests/distributed/without_network.py, with unshare -rn"
)
def test_these_tests_have_loopback_alone() -> None:
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    with pytest.raises(OSError, match="unreachable"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect(("192.0.2.1", 9))
