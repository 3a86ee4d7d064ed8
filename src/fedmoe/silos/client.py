"""The ClientApp of a node. It needs no torch: messages go to a worker that stays alive.

Flower starts this in a new process for every message, on a node; in its simulation, in processes that stay.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmoe.engines.channel import Channel
from fedmoe.engines.extras import require
from fedmoe.engines.flower.records import to_frame, to_records
from fedmoe.errors import FedmoeError, RunError
from fedmoe.framing import Bytes, pack
from fedmoe.silos.place import Place
from fedmoe.silos.sockets import in_folder

MAX_BYTES = 16 << 30  # of one message
STARTING_SECONDS = 300.0  # until a new worker listens: it imports torch
LOOK_SECONDS = 0.05
TIMES_ASKED = 2

_here: dict[str, Callable[[dict[str, Any], Bytes], Bytes]] = {}  # workers of this process, in a simulation
_started: list["subprocess.Popen[bytes]"] = []  # workers that outlive this process: nobody waits for their end


def client_app(hook: str, app: Path) -> Any:
    """`hook` is the import string of `client_data(context)`, `app` the folder with the app's config."""
    made = require("flwr.clientapp", "flower").ClientApp()
    for kind in (made.train, made.evaluate, made.query):
        kind()(lambda message, context: _handle(hook, app, message, context))
    return made


def _handle(hook: str, app: Path, message: Any, context: Any) -> Any:
    simulated = _is_simulated()
    try:
        frame, envelope = to_frame(message.content, MAX_BYTES)
        place = Place.of(app, hook, context, simulated=simulated)
        reply = (_ask_here if simulated else ask_worker)(place, envelope, frame)
    except FedmoeError as error:
        reply, envelope = pack({"error": type(error).__name__, "message": str(error)}), {}
    return require("flwr.app", "flower").Message(to_records(reply, envelope), reply_to=message)


def _is_simulated() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _ask_here(place: Place, envelope: dict[str, Any], frame: Bytes) -> Bytes:
    if place.key not in _here:
        from fedmoe.silos.warm import Warm

        _here[place.key] = Warm(place).handle
    return _here[place.key](envelope, frame)


def ask_worker(place: Place, envelope: dict[str, Any], frame: Bytes) -> Bytes:
    """The reply of this node's worker, which is started if none is there.

    One that was lost before it replied is replaced and asked again: a message is answered once, by the node's journal.
    """
    request = pack({"envelope": envelope}, [[frame]])
    Path(place.home).mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(TIMES_ASKED):
        with _connection(place) as end:
            channel = Channel(end)
            try:
                channel.send(request)
                return channel.receive()
            except (EOFError, OSError) as error:  # also of one that was killed just now: its socket still accepts
                lost = error
    raise RunError(
        f"this node's worker was lost {TIMES_ASKED} times in the middle of its work; see {_log(place)}."
    ) from lost


def _connection(place: Place) -> socket.socket:
    deadline = time.monotonic() + STARTING_SECONDS
    started: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline:
        end = _connected(place)
        if end is not None:
            return end
        if started is None or started.poll() == 0:  # 0: it made room for another one, which has left since
            started = _start(place)
        elif started.returncode is not None:
            raise RunError(f"this node's worker ended with exit code {started.returncode}; see {_log(place)}.")
        time.sleep(LOOK_SECONDS)
    raise RunError(f"this node's worker did not start within {STARTING_SECONDS:g} seconds; see {_log(place)}.")


def _connected(place: Place) -> socket.socket | None:
    """None where nobody listens."""
    end = socket.socket(socket.AF_UNIX)
    try:
        with in_folder(Path(place.home)) as folder:
            end.connect(f"{folder}/worker-{place.key}.sock")
    except OSError:
        end.close()
        return None
    return end


def _log(place: Place) -> Path:
    return Path(place.home) / "worker.log"


def _start(place: Place) -> "subprocess.Popen[bytes]":
    """In a session of its own: it outlives this process."""
    with _log(place).open("ab") as log:
        _log(place).chmod(0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "fedmoe.silos.warm", place.to_json()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    return process
