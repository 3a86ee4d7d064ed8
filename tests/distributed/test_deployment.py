"""A deployment with TLS and node keys on the loopback interface: SuperLink, three nodes, nginx; and what is killed.

Tests run in order and share one deployment: to start it takes most of their time.
"""

import http.client
import json
import re
import signal
import sqlite3
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from distributed.deployment import PATIENCE, Deployment, deployed, kill_process, wait_for
from distributed.proxy import NGINX, needs_nginx, nginx_to
from fedmoe.silos.certificates import write_certificates

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
pytestmark = pytest.mark.slow

ROUNDS = 3
LONG = 12  # rounds, in which a node that was killed comes back: Flower takes it again after about a minute


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Node 1 connects through the proxy, where there is one."""
    with ExitStack() as stack:
        made = stack.enter_context(deployed(tmp_path_factory.mktemp("silos")))
        config = made.app / "fedmoe.toml"
        text = (
            config.read_text()
            .replace("deadline = 600", "deadline = 100")
            .replace("join_seconds = 300", "join_seconds = 150")
        )
        config.write_text(text)
        made.start_link()
        for number in range(3):
            made.register(number)
        if NGINX:
            made.proxy = stack.enter_context(nginx_to(made.port, made.folder / "keys", made.folder / "nginx"))
        made.start_node(0, None, "--send-scores")
        made.start_node(1, None, superlink=f"127.0.0.1:{made.proxy or made.port}")
        made.start_node(2)
        yield made


def start_run(silos: Deployment, name: str, *settings: str) -> "subprocess.Popen[bytes]":
    told = " ".join([f'directory="{silos.folder}/{name}"', *settings])
    return silos.start(name, "flwr", "run", str(silos.app), "silos", "--stream", "--run-config", told)


def wait_for_round(silos: Deployment, name: str, number: int) -> None:
    wait_for(
        lambda: f"fedmoe: round {number}:" in silos.log(name), f"round {number} of {name}: {silos.log(name)[-1500:]}"
    )


def wait_for_end(silos: Deployment, name: str) -> None:
    def ended() -> bool:
        # A node that is gone is a rejection, in Flower's own words an error; the run goes on.
        unexpected = [line for line in silos.log(name).splitlines() if "rror" in line and "is rejected" not in line]
        assert not unexpected, silos.log(name)[-3000:]
        return "fedmoe: finished" in silos.log(name)

    wait_for(ended, f"the end of {name}: {silos.log(name)[-1500:]}")


def final_state(folder: Path) -> bytes:
    content = (folder / "checkpoints" / f"round-{ROUNDS:08d}.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]  # the tensors: the header names the run


def run_id(folder: Path) -> str:
    found = re.search(r'run_id = "(\w+)"', (folder / "config.toml").read_text())
    assert found
    return found[1]


def test_a_run_of_three_nodes_completes(silos: Deployment) -> None:
    start_run(silos, "whole")
    wait_for_end(silos, "whole")
    results = json.loads((silos.folder / "whole" / "results.json").read_text())
    assert {score["client"] for score in results["scores"]} == {0}  # the one whose owner agreed to send scores
    assert results["rejected"] == 0 and results["abandoned_rounds"] == 0


def test_personal_models_are_left_on_the_nodes(silos: Deployment) -> None:
    done = subprocess.run(
        ["fedmoe", "flower", "personalize", str(silos.app), "silos", "--dir", f"{silos.folder}/whole"],
        env=silos.environment, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "personal models lie on the nodes of clients [0, 1, 2]" in done.stdout and done.returncode == 0, done.stderr
    models = sorted(silos.folder.glob("state-*/runs/*/model.pt2"))
    assert len(models) == 3 and all(model.stat().st_mode & 0o777 == 0o600 for model in models)


@needs_nginx
def test_the_second_node_took_part_through_the_proxy(silos: Deployment) -> None:
    passed = (silos.folder / "nginx" / "access.log").read_text()
    for route in ("activate-node", "pull-messages", "push-messages"):
        assert f'"POST /v1/fleet/{route} HTTP/1.1" 200' in passed


def test_private_files_are_for_their_owner_alone(silos: Deployment) -> None:
    for path in silos.folder.glob("state-*/**/*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_killed_server_is_resumed_to_the_same_end(silos: Deployment) -> None:
    start_run(silos, "killed")
    wait_for_round(silos, "killed", 1)
    silos.kill("link")
    silos.kill("killed")
    silos.start_link()
    silos.start("resumed", "fedmoe", "flower", "resume", str(silos.app), "silos", "--dir", f"{silos.folder}/killed")
    wait_for_end(silos, "resumed")
    assert silos.processes["resumed"].wait(PATIENCE) == 0
    assert re.search(r"3 rounds, from round [12] on", silos.log("resumed"))
    assert final_state(silos.folder / "killed") == final_state(silos.folder / "whole")
    assert (silos.folder / "killed" / "attempt").read_text() == "2"


def test_a_killed_node_comes_back_with_the_state_of_the_last_round_that_counted(silos: Deployment) -> None:
    config = silos.app / "fedmoe.toml"
    config.write_text(config.read_text().replace("\nrounds = 3", f"\nrounds = {LONG}"))
    start_run(silos, "node-killed")
    wait_for_round(silos, "node-killed", 1)
    silos.kill("node-2")
    for path in (silos.folder / "state-2").glob("worker-*.pid"):
        kill_process(path)
    silos.start_node(2)
    wait_for_end(silos, "node-killed")
    folder = silos.folder / "node-killed"
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    took_part = [event["round"] for event in rounds if any("2" in sent for sent in event["sent"].values())]
    assert len(rounds) == LONG and not any(event["abandoned"] for event in rounds)
    assert 1 in took_part and LONG in took_part and len(took_part) < LONG
    store = silos.folder / "state-2" / "runs" / run_id(folder) / "private.sqlite"
    with closing(sqlite3.connect(store)) as db:
        (latest,) = db.execute("SELECT MAX(version) FROM state WHERE kind = 'client'").fetchone()
    assert latest == took_part[-1] * 2  # two versions for each round of one exchange


def refusal(silos: Deployment, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command, env={**silos.environment, **environment}, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode != 0, done.stdout
    return " ".join((done.stdout + done.stderr).split())


def node_command(silos: Deployment, key: str, ca: str, address: str) -> list[str]:
    return [
        "fedmoe", "flower", "node", "--superlink", address, "--root-certificates", ca, "--key", key,
        "--client", "0", "--dir", f"{silos.folder}/state-x", "--tries", "1",
    ]  # fmt: skip


def door(silos: Deployment, name: str) -> int:
    if name == "proxy":
        assert silos.proxy is not None
        return silos.proxy
    return silos.port


doors = pytest.mark.parametrize("name", ["superlink", pytest.param("proxy", marks=needs_nginx)])


@doors
def test_who_has_no_registered_key_or_another_authority_is_refused(
    name: str, silos: Deployment, tmp_path: Path
) -> None:
    keys, address = silos.folder / "keys", f"127.0.0.1:{door(silos, name)}"
    said = refusal(silos, *node_command(silos, f"{keys}/node-3", f"{keys}/ca.crt", address))
    assert "ended 1 times in a row" in said and "key registered" in said
    write_certificates(tmp_path / "other", ["localhost"], 0)
    said = refusal(silos, *node_command(silos, f"{keys}/node-0", f"{tmp_path}/other/ca.crt", address))
    assert "certificate of" in said and "is not one of" in said


def test_a_client_whose_key_is_unregistered_is_refused(silos: Deployment) -> None:
    keys = silos.folder / "keys"
    said = silos.flwr("supernode", "unregister", silos.register(3), "silos")
    assert "unregistered successfully" in said
    said = refusal(silos, *node_command(silos, f"{keys}/node-3", f"{keys}/ca.crt", f"127.0.0.1:{silos.port}"))
    assert "ended 1 times in a row" in said and "key registered" in said


def test_an_address_where_nobody_listens_is_said(silos: Deployment) -> None:
    keys = silos.folder / "keys"
    said = refusal(silos, *node_command(silos, f"{keys}/node-0", f"{keys}/ca.crt", "127.0.0.1:1"))
    assert "no SuperLink is at 127.0.0.1:1" in said


@doors
def test_plaintext_is_refused(name: str, silos: Deployment) -> None:
    """By a closed connection, or in words of HTTP and before anything is passed on."""
    line = http.client.HTTPConnection("127.0.0.1", door(silos, name), timeout=20)
    try:
        line.request("POST", "/v1/fleet/pull-messages", b"")
        answer = line.getresponse()
        assert (answer.status, b"plain HTTP request was sent to HTTPS port" in answer.read()) == (400, True)
    except (http.client.HTTPException, ConnectionError):
        pass
    finally:
        line.close()


def status(silos: Deployment, port: int, path: str, body: bytes = b"") -> int:
    context = ssl.create_default_context(cafile=str(silos.folder / "keys" / "ca.crt"))
    line = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    try:
        line.request("POST", path, body)
        return line.getresponse().status
    finally:
        line.close()


@needs_nginx
def test_runs_and_keys_are_out_of_reach_behind_the_proxy(silos: Deployment) -> None:
    """The same commands with the same files succeed on the server itself: only the proxy is in the way."""
    config = silos.folder / "outside" / "config.toml"
    config.parent.mkdir()
    text = (silos.folder / "flwr" / "config.toml").read_text()
    config.write_text(text.replace(f":{silos.port}", f":{silos.proxy}"))
    environment = {**silos.environment, "FLWR_HOME": str(config.parent)}
    key = f"{silos.folder}/keys/node-3.pub"
    for command in (["list", "silos"], ["supernode", "register", key, "silos"], ["run", str(silos.app), "silos"]):
        done = subprocess.run(
            ["flwr", *command], env=environment, capture_output=True, text=True, timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode != 0 and "403" in done.stdout + done.stderr, done.stdout + done.stderr


@needs_nginx
def test_no_spelling_of_a_control_route_passes_the_proxy(silos: Deployment) -> None:
    from flwr.superlink.routers.control.router import router

    routes = [route.path for route in router.routes]
    assert len(routes) > 5 and all(route.startswith("/v1/control/") for route in routes)
    spelled = [f"/v1/fleet/{up}control/list-runs" for up in ("../", "%2e%2e/", "..%2f", "x/../../", "/../")]
    others = ["/v1/runtime/acquire-task", "//v1/control/list-runs", "/V1/control/list-runs", "/health", "/docs", "/"]
    for path in [*routes, *spelled, *others]:
        assert status(silos, door(silos, "proxy"), path) == 403, path


@needs_nginx
def test_pieces_as_large_as_flower_makes_them_pass_the_proxy(silos: Deployment) -> None:
    """Five megabytes, which is more than nginx lets through where nothing is said."""
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as LARGEST

    too_large = 413
    path, port = "/v1/fleet/push-object", door(silos, "proxy")
    answer = status(silos, port, path, bytes(LARGEST + 1000))
    assert answer == status(silos, silos.port, path, bytes(LARGEST + 1000)) != too_large
    assert status(silos, port, path, bytes(65 << 20)) == too_large


def test_a_resume_with_another_config_is_refused(silos: Deployment) -> None:
    config = silos.app / "fedmoe.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    silos.start("changed", "fedmoe", "flower", "resume", str(silos.app), "silos", "--dir", f"{silos.folder}/whole")
    sentence = "belongs to another run: seed is 0 there and 1 here"
    assert silos.processes["changed"].wait(PATIENCE) == 2 and sentence in silos.log("changed")


def test_a_node_that_is_told_to_stop_leaves_no_process(silos: Deployment) -> None:
    pids = [int(path.read_text()) for path in (silos.folder / "state-0").glob("worker-*.pid")]
    silos.kill("node-0", signal.SIGTERM)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the worker's end", 30)
