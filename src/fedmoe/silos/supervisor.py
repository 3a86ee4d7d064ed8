"""`fedmoe flower node`: a SuperNode that comes back by itself.

Flower's SuperNode ends, with no second try, when it is refused: for about a minute after a node was killed its own key
counts as connected. So it is started again, with pauses, until it has failed so many times in a row at once.
"""

import os
import signal
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedmoe.engines.flower.environment import program, quiet_environment
from fedmoe.errors import ConfigError, RunError
from fedmoe.storage.files import make_private_folder

FIRST_PAUSE, LONGEST_PAUSE = 3.0, 30.0  # seconds before it is started again
SHORT_LIFE = 90.0  # seconds: whoever lived longer had been accepted
LEAVING_SECONDS = 20.0
CONNECTING_SECONDS = 15.0


@dataclass(frozen=True)
class NodeSettings:
    superlink: str  # host:port
    root_certificates: Path
    key: Path
    client: int
    home: Path
    send_scores: bool = False
    release: bool = False
    node_config: str = ""  # what else client_data is told: key=value key=value
    tries: int = 30

    def command(self, supernode: str, port: int) -> list[str]:
        agreed = f"send-scores={str(self.send_scores).lower()} release={str(self.release).lower()}"
        told = f'partition-id={self.client} state-dir="{self.home.absolute()}" {agreed} {self.node_config}'.strip()
        return [
            supernode, "--superlink", self.superlink, "--root-certificates", str(self.root_certificates),
            "--auth-supernode-private-key", str(self.key), "--node-config", told,
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip


def supervise(settings: NodeSettings) -> None:
    """Until it is told to stop (SIGTERM, Ctrl-C), or the SuperNode failed `tries` times in a row."""
    supernode = program("flower-supernode")
    for path in (settings.root_certificates, settings.key):
        if not path.is_file():
            raise ConfigError(f"{path} is no file. Name the authority's certificate and this node's key.")
    make_private_folder(settings.home)
    check_superlink(settings.superlink, settings.root_certificates)
    _Supervisor(settings, supernode).run()


def check_superlink(address: str, root_certificates: Path) -> None:
    """Say at once what Flower would try to do for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--superlink {address!r} is no address. Write it as host:port, such as fed.example.org:443.")
    try:
        context = ssl.create_default_context(cafile=str(root_certificates))
    except ssl.SSLError as error:
        raise ConfigError(f"{root_certificates} holds no certificate in PEM format ({error.reason}).") from error
    try:
        with (
            socket.create_connection((host, int(port)), CONNECTING_SECONDS) as end,
            context.wrap_socket(end, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of {address} is not one of {root_certificates}: {error.verify_message}. Ask who runs the "
            "server for the authority's certificate."
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"{address} does not speak TLS ({error.reason}). Start the SuperLink with its certificate."
        ) from error
    except OSError as error:
        raise ConfigError(f"no SuperLink is at {address}: {error}. Start it, or correct the address.") from error


class _Supervisor:
    def __init__(self, settings: NodeSettings, supernode: str) -> None:
        self._settings, self._supernode = settings, supernode
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        failures, pause = 0, FIRST_PAUSE
        try:
            while not self._stopping:
                begun = time.monotonic()
                command = self._settings.command(self._supernode, _free_port())
                self._child = subprocess.Popen(command, env=quiet_environment())
                code = self._child.wait()
                if self._stopping:
                    return
                if time.monotonic() - begun > SHORT_LIFE:
                    failures, pause = 0, FIRST_PAUSE
                failures += 1
                if failures >= self._settings.tries:
                    raise RunError(
                        f"flower-supernode ended {failures} times in a row, at last with exit code {code}; what it "
                        "said is above. Is this node's key registered (flwr supernode register), and used here alone?"
                    )
                print(f"flower-supernode ended with {code}; started again in {pause:.0f} s", flush=True)
                self._wait(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
        finally:
            self._end()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            time.sleep(0.2)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        if self._child and self._child.poll() is None:
            self._child.terminate()

    def _end(self) -> None:
        """The SuperNode, and the worker that it left: both have nothing to lose."""
        if self._child and self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        stop_workers(self._settings.home)


def stop_workers(home: Path) -> None:
    """Of this node. Their writes are transactions, so they may be ended at any time."""
    for path in home.glob("worker-*.pid"):
        text = path.read_text().strip()
        command = Path(f"/proc/{text}/cmdline")
        if text.isdigit() and command.exists() and b"fedmoe.silos.warm" in command.read_bytes():
            os.kill(int(text), signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port: int = end.getsockname()[1]
        return port
