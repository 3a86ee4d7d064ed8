"""A Flower deployment on the loopback interface, for tests: all in one folder, stopped with it, every wait bounded."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedmoe.silos.app_files import write_app
from fedmoe.silos.certificates import write_certificates

BIN = Path(sys.executable).parent
PATIENCE = 240.0  # seconds: a bound, not a delay


def free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port: int = end.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


def wait_for(holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds:g} seconds: {what}")


class Deployment:
    def __init__(self, folder: Path) -> None:
        self.folder, self.app = folder, folder / "silo_app"
        self.port = free_port()
        self.proxy: int | None = None  # the port of the proxy in front, if there is one
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"), "FEDMOE_SILO_HOME": str(folder / "silos"),
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        write_certificates(folder / "keys", ["localhost", "127.0.0.1"], 4)
        write_app(self.app)
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "silos"\n[superlink.silos]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder}/keys/ca.crt"\n'
        )

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=self.folder,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def start_link(self) -> None:
        keys = self.folder / "keys"
        self.start(
            "link", "flower-superlink", "--ssl-ca-certfile", f"{keys}/ca.crt", "--ssl-certfile", f"{keys}/server.crt",
            "--ssl-keyfile", f"{keys}/server.key", "--enable-supernode-auth", "--database", "link.db",
            "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(self.port),
        )  # fmt: skip
        wait_for(lambda: listens(self.port), "the SuperLink listens")

    def register(self, number: int) -> str:
        """The id that Flower gave the node."""
        said = self.flwr("supernode", "register", f"{self.folder}/keys/node-{number}.pub", "silos", "--format", "json")
        found = re.search(r'"node-id": "?(\d+)', said)
        assert found, said
        return found[1]

    def start_node(self, client: int, key: int | None = None, *options: str, superlink: str = "") -> None:
        key = client if key is None else key
        self.start(
            f"node-{client}", "fedmoe", "flower", "node", "--superlink", superlink or f"127.0.0.1:{self.port}",
            "--root-certificates", f"{self.folder}/keys/ca.crt", "--key", f"{self.folder}/keys/node-{key}",
            "--client", str(client), "--dir", f"{self.folder}/state-{client}", *options,
        )  # fmt: skip

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=PATIENCE,
            cwd=self.folder, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The process and all that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(PATIENCE)
        finally:
            kill_group(process.pid)

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name, signal.SIGTERM)
        for path in self.folder.glob("state-*/worker-*.pid"):
            kill_process(path)


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_process(path: Path) -> None:
    with suppress(ProcessLookupError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    if shutil.which("flower-superlink", path=f"{BIN}:{os.environ['PATH']}") is None:
        pytest.skip("the extra flower is not installed: pip install 'fedmoe[flower]'")
    made = Deployment(folder)
    try:
        yield made
    finally:
        made.stop()
