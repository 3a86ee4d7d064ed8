"""The node's worker, which stays alive between messages.

Flower starts a process for every message. This one imports torch and reads the client's data once, and is asked through
a socket in the node's own folder; it leaves when nobody has asked for a while. `python -m fedmoe.silos.warm PLACE`.
"""

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from fedmoe import import_strings
from fedmoe.config import read_config
from fedmoe.engines.channel import Channel
from fedmoe.engines.embedded import keep_freed_memory
from fedmoe.engines.extras import require
from fedmoe.engines.flower.post import error_frame
from fedmoe.errors import FedmoeError
from fedmoe.framing import Bytes, unpack
from fedmoe.silos.node import Agreement, SiloNode
from fedmoe.silos.place import CONFIG_FILE, Place
from fedmoe.silos.sockets import in_folder
from fedmoe.storage.files import make_private_folder, open_private

IDLE_SECONDS = 1800.0
RECEIVING_SECONDS = 60.0  # for a message whose sender is on this machine


def open_node(place: Place) -> SiloNode:
    """With the data that the app's hook gives for this node."""
    config = read_config(Path(place.app) / CONFIG_FILE)
    if place.app not in sys.path:
        sys.path.insert(0, place.app)
    data = import_strings.load("client_data", place.hook)(_context(place))
    agreement = Agreement(scores=place.agreed("send-scores"), release=place.agreed("release"))
    return SiloNode(config, place.client, data, Path(place.home), agreement)


def _context(place: Place) -> Any:
    flwr = require("flwr.app", "flower")
    told = {"node_config": place.node_config, "run_config": place.run_config}
    return flwr.Context(run_id=0, node_id=0, state=flwr.RecordDict(), **told)


class Warm:
    """`handle` one request after the other. A node that cannot be opened says why, and is opened anew the next time."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._node: SiloNode | None = None

    def handle(self, envelope: dict[str, Any], frame: Bytes) -> Bytes:
        try:
            if self._node is None:
                self._node = open_node(self._place)
        except FedmoeError as error:
            return error_frame(str(error), type(error).__name__)
        except Exception as error:  # of the hook, which is the user's
            return error_frame(f"client_data failed: {type(error).__name__}: {error}", "DataError")
        return self._node.handle(envelope, frame)


def serve(place: Place, idle_seconds: float = IDLE_SECONDS) -> None:
    """Until nobody has asked for so long. Of two that are started at once, one leaves again."""
    home = Path(place.home)
    make_private_folder(home)
    lock = open_private(home / f"worker-{place.key}.pid", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    warm = Warm(place)
    with in_folder(home) as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/worker-{place.key}.sock"
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(16)
        listener.settimeout(idle_seconds)
        while True:
            try:
                end, _ = listener.accept()
            except TimeoutError:
                Path(path).unlink(missing_ok=True)
                return
            with end:
                _answer(end, warm)


def _answer(end: socket.socket, warm: Warm) -> None:
    end.settimeout(RECEIVING_SECONDS)
    channel = Channel(end)
    try:
        header, (frame,) = unpack(channel.receive())
        channel.send(warm.handle(header["envelope"], frame))
    except (EOFError, OSError, FedmoeError, ValueError, KeyError) as error:
        print(f"a request was left unanswered: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    serve(Place.from_json(sys.argv[1]))


if __name__ == "__main__":
    main()
