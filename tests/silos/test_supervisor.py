import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedmoe.errors import ConfigError, RunError
from fedmoe.silos import supervisor
from fedmoe.silos.supervisor import NodeSettings, check_superlink, stop_workers, supervise


def settings_in(folder: Path, **changes: object) -> NodeSettings:
    for name in ("ca.crt", "node-0"):
        (folder / name).touch()
    given = {"superlink": "127.0.0.1:1", "root_certificates": folder / "ca.crt", "key": folder / "node-0", "client": 0}
    return NodeSettings(**{**given, "home": folder / "home", "tries": 3, **changes})  # type: ignore[arg-type]


def fake_supernode(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in Flower's place; whoever is at the address is taken for granted."""
    program = folder / "flower-supernode"
    program.write_text(f"#!/bin/sh\necho started >> {folder}/starts\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(supervisor, "program", lambda _name: str(program))
    monkeypatch.setattr(supervisor, "check_superlink", lambda *_: None)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.05)


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


@contextmanager
def kept_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_supernode_that_ends_is_started_again_so_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_supernode(tmp_path, "exit 49", monkeypatch)
    with (
        kept_handlers(),
        pytest.raises(RunError, match=r"ended 3 times in a row, at last with exit code 49.*registered"),
    ):
        supervise(settings_in(tmp_path))
    assert starts(tmp_path) == 3


def test_one_that_lived_long_enough_starts_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_supernode(tmp_path, f"[ $(wc -l < {tmp_path}/starts) -lt 4 ] && sleep 0.3; exit 1", monkeypatch)
    monkeypatch.setattr(supervisor, "SHORT_LIFE", 0.2)
    with kept_handlers(), pytest.raises(RunError, match="ended 3 times in a row"):
        supervise(settings_in(tmp_path))
    assert starts(tmp_path) == 5  # three long lives, of which the last begins the count


def test_a_stop_ends_the_supernode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_supernode(tmp_path, "exec sleep 60", monkeypatch)
    begun = time.monotonic()
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with kept_handlers():
        supervise(settings_in(tmp_path))
    assert time.monotonic() - begun < 20 and starts(tmp_path) == 1


def test_a_supernode_is_told_what_its_owner_decided(tmp_path: Path) -> None:
    command = settings_in(tmp_path, send_scores=True, node_config='table="ward.csv"').command("flower-supernode", 9000)
    told = command[command.index("--node-config") + 1]
    assert told == (f'partition-id=0 state-dir="{tmp_path}/home" send-scores=true release=false table="ward.csv"')
    assert "--insecure" not in command


def test_a_supernode_is_told_to_send_nothing_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_supernode(tmp_path, f"env > {tmp_path}/told; exit 1", monkeypatch)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    with kept_handlers(), pytest.raises(RunError):
        supervise(settings_in(tmp_path, tries=1))
    told = (tmp_path / "told").read_text().splitlines()
    assert {"FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", "RAY_USAGE_STATS_ENABLED=0"} <= set(told)


def test_only_workers_of_this_package_are_ended(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "fedmoe.silos.warm"])
    try:
        for number, process in enumerate((other, ours)):
            (tmp_path / f"worker-{number}.pid").write_text(str(process.pid))
        (tmp_path / "worker-2.pid").write_text("")
        time.sleep(0.3)
        stop_workers(tmp_path)
        assert ours.wait(20) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (other, ours):
            process.kill()
            process.wait()


def test_missing_files_and_addresses_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "program", lambda name: name)
    with pytest.raises(ConfigError, match="nowhere is no file"):
        supervise(settings_in(tmp_path, key=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="holds no certificate"):
        supervise(settings_in(tmp_path))
    with pytest.raises(ConfigError, match=r"'fed.example.org' is no address"):
        check_superlink("fed.example.org", tmp_path / "ca.crt")


def test_certificates_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
    from fedmoe.silos.certificates import write_certificates

    written = write_certificates(tmp_path / "keys", ["fed.example.org", "127.0.0.1"], 1)
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    assert (tmp_path / "keys" / "node-0").read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    with pytest.raises(ConfigError, match="is there already"):
        write_certificates(tmp_path / "keys", ["fed.example.org"], 1)
    with pytest.raises(ConfigError, match=r"no SuperLink is at 127.0.0.1:1"):
        check_superlink("127.0.0.1:1", tmp_path / "keys" / "ca.crt")
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            end, _ = plain.accept()
            with end:
                end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConfigError, match="does not speak TLS"):
            check_superlink(f"127.0.0.1:{plain.getsockname()[1]}", tmp_path / "keys" / "ca.crt")
        thread.join(10)
