"""The worker that stays alive, and the light process that asks it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmoe.engines.channel import Channel
from fedmoe.errors import ConfigError, RunError
from fedmoe.framing import pack, unpack
from fedmoe.silos import client
from fedmoe.silos.app_files import write_app
from fedmoe.silos.client import ask_worker
from fedmoe.silos.place import Place
from fedmoe.silos.sockets import in_folder
from fedmoe.silos.supervisor import stop_workers

ENVELOPE = {"run": "0" * 32, "attempt": 1}
HELLO = pack({"do": "hello"})

DATA = """
import numpy as np

def client_data(context):
    if context.node_config.get("broken"):
        raise FileNotFoundError("ward.csv")
    return np.random.default_rng(0).random((30, 64), dtype="float32"), np.arange(30) % 10
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    app = tmp_path / ("a_folder_with_a_name_that_is_far_longer_than_a_socket_s_address_may_be_" * 2) / "silo_app"
    write_app(app)
    (app / "silo_app" / "data.py").write_text(DATA)
    made = Place(str(app), "silo_app.data:client_data", 1, str(app.parent / "node"), {"partition-id": 1}, {}, False)
    yield made
    stop_workers(Path(made.home))


def test_the_client_app_needs_no_torch() -> None:
    code = "import sys, fedmoe.silos.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_decision_of_the_owner_is_another_worker(place: Place) -> None:
    agreed = Place(place.app, place.hook, 1, place.home, {"partition-id": 1, "send-scores": True}, {}, False)
    assert agreed.key != place.key and agreed.agreed("send-scores") and not place.agreed("send-scores")
    assert Place.from_json(place.to_json()) == place
    odd = Place(place.app, place.hook, 1, place.home, {"release": "yes"}, {}, False)
    with pytest.raises(ConfigError, match=r"release is 'yes'. Write true or false"):
        odd.agreed("release")


def test_a_node_without_a_number_is_told_how_to_get_one() -> None:
    class Context:
        node_config: dict[str, object] = {}  # noqa: RUF012
        run_config: dict[str, object] = {}  # noqa: RUF012

    with pytest.raises(ConfigError, match=r"partition-id is None.*--node-config 'partition-id=0'"):
        Place.of(Path("app"), "a:b", Context(), simulated=False)


@pytest.mark.slow
def test_a_worker_is_started_once_and_again_after_it_was_killed(place: Place) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
    assert unpack(ask_worker(place, ENVELOPE, HELLO))[0]["client"] == 1
    (path,) = Path(place.home).glob("worker-*.pid")
    first = int(path.read_text())
    assert unpack(ask_worker(place, ENVELOPE, HELLO))[0]["client"] == 1 and int(path.read_text()) == first
    os.kill(first, signal.SIGKILL)
    assert unpack(ask_worker(place, ENVELOPE, HELLO))[0]["client"] == 1 and int(path.read_text()) != first
    assert {one.stat().st_mode & 0o077 for one in Path(place.home).iterdir()} == {0}
    broken = Place(place.app, place.hook, 1, place.home, {"partition-id": 1, "broken": True}, {}, False)
    assert (
        "client_data failed: FileNotFoundError: ward.csv" in unpack(ask_worker(broken, ENVELOPE, HELLO))[0]["message"]
    )


def worker_that_is_lost(place: Place, times: int) -> threading.Thread:
    """Takes so many requests without a reply, as one that is killed does, and answers the next with what was asked."""
    Path(place.home).mkdir()
    with in_folder(Path(place.home)) as folder:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/worker-{place.key}.sock")
    listener.listen()
    listener.settimeout(20)

    def serve() -> None:
        with listener:
            for _ in range(times):
                listener.accept()[0].close()
            if times < client.TIMES_ASKED:
                end, _ = listener.accept()
                with end:
                    Channel(end).send(unpack(Channel(end).receive())[1][0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_worker_that_is_lost_is_asked_once_more(place: Place) -> None:
    thread = worker_that_is_lost(place, 1)
    assert bytes(ask_worker(place, ENVELOPE, HELLO)) == bytes(HELLO)
    thread.join(20)


def test_a_worker_that_is_lost_again_is_said(place: Place) -> None:
    thread = worker_that_is_lost(place, client.TIMES_ASKED)
    with pytest.raises(RunError, match=r"lost 2 times in the middle of its work; see .*worker.log"):
        ask_worker(place, ENVELOPE, HELLO)
    thread.join(20)


def test_a_worker_that_does_not_start_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match=r"worker ended with exit code 1; see .*worker.log"):
        ask_worker(place, ENVELOPE, HELLO)
