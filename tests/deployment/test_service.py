"""A served model as programs on the machine meet it: over a real port, with good and with bad requests."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import nan

import pytest
import torch

import fedmoe
from builders import tiny_federation
from deployment.wards import ward_rows
from fedmoe.deployment import service
from fedmoe.deployment.predictions import reader_of
from fedmoe.deployment.service import Limits, make_app
from fedmoe.deployment.serving import about, listen, serve
from fedmoe.errors import RunError
from fedmoe.models.network import Network
from fedmoe.testing.federation import tiny_config

LIMITS = Limits(body_bytes=20_000, rows=50, seconds=5.0)
COLUMNS = ("age", "pressure", "smoker")


class Served:
    """A server in a thread of this process, on a free port."""

    def __init__(self, result, client, limits=LIMITS):
        model = result.personal_model(client)
        app = make_app(model, reader_of(result), about(result, model), limits)
        listener = listen(0)
        self.port, servers = listener.getsockname()[1], []
        self._thread = threading.Thread(target=serve, args=(app, listener, servers.append), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not (servers and servers[0].started) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._server = servers[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def ask(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def predict(self, body, headers=None):
        return self.ask("POST", "/predict", body, headers)


@pytest.fixture(scope="module")
def served(wards):
    with Served(wards, "north") as server:
        yield server


def rows_of(count, seed):
    return [{name: row[name] for name in COLUMNS} for row in ward_rows(count, seed)]


def test_it_answers_as_the_run_does_and_says_which_expert_did(served, wards):
    rows = rows_of(6, 5)
    status, answer = served.predict({"rows": rows})
    model, x = wards.personal_model("north"), wards.federation.table.encode(rows)
    assert status == 200 and answer["class_names"] == ["ill", "well"]
    torch.testing.assert_close(torch.tensor(answer["probabilities"]), model(x), atol=1e-5, rtol=0)
    assert answer["classes"] == [("ill", "well")[best] for best in model(x).argmax(1)]
    weights = model.expert_weights(x)
    assert answer["experts"]["names"] == ["specialist", "general"]
    torch.testing.assert_close(torch.tensor(answer["experts"]["weights"])[:, 0], weights["specialist"])
    said = ["specialist" if share >= 0.5 else "general" for share in weights["specialist"]]
    assert answer["experts"]["answered"] == said


def test_rows_may_be_lists_of_the_inputs_themselves(served, wards):
    status, answer = served.predict({"rows": [[0.5, -1, 0, 1]]})
    expected = wards.personal_model("north")(torch.tensor([[0.5, -1, 0, 1]]))
    assert status == 200 and answer["probabilities"][0] == pytest.approx(expected[0].tolist(), abs=1e-6)


def test_concurrent_requests_get_each_its_own_answer(served, wards, monkeypatch):
    """A network holds one expert's weights at a time: others get every chance to put theirs in between."""
    install = Network._install

    def leisurely(network, params):
        install(network, params)
        time.sleep(0.002)

    monkeypatch.setattr(Network, "_install", leisurely)
    model, table = wards.personal_model("north"), wards.federation.table
    asked = [rows_of(1 + number % 5, 100 + number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda rows: served.predict({"rows": rows}), asked))
    for rows, (status, answer) in zip(asked, answers, strict=True):
        assert status == 200
        torch.testing.assert_close(torch.tensor(answer["probabilities"]), model(table.encode(rows)), atol=1e-5, rtol=0)


def test_it_says_what_it_is(served, wards):
    assert served.ask("GET", "/health") == (200, {"status": "ok"})
    status, facts = served.ask("GET", "/")
    assert status == 200 and facts["client"] == "north" and facts["class_names"] == ["ill", "well"]
    assert facts["columns"] == ["age", "pressure", "smoker"] and facts["limits"]["rows"] == 50
    assert facts["run"]["id"] == wards.data["run_id"] and {score["client"] for score in facts["scores"]} == {0}


GOOD = {"age": 1, "pressure": 2, "smoker": "no"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "is no JSON"),
        (b"\xff\xfe", 400, "is no JSON"),
        (b"{" * 9000, 400, "is no JSON"),
        (b"[" * 9000, 400, "is no JSON"),
        (b'{"rows": [[1, NaN, 0, 1]]}', 400, "NaN is no number"),
        (b'{"rows": [[' + b"9" * 5000 + b"]]}", 400, "is no JSON"),
        ([1, 2], 400, "no list under 'rows'"),
        ({"row": []}, 400, "no list under 'rows'"),
        ({"rows": GOOD}, 400, "no list under 'rows'"),
        ({"rows": []}, 422, "no list of at least one row"),
        ({"rows": [[1, 2]]}, 422, "x has shape (1, 2)"),
        ({"rows": [[1, 2, 3, "x"]]}, 422, "something else than numbers"),
        ({"rows": [[1, 2, 3, 1e39]]}, 422, "NaN or infinity"),
        ({"rows": [GOOD, [1, 2, 3, 4]]}, 422, ""),
        ({"rows": [{"age": 1, "pressure": 2}]}, 422, "no column 'smoker'"),
        ({"rows": [{**GOOD, "smoker": "often"}]}, 422, "the category 'often' is not known"),
        ({"rows": [{**GOOD, "age": None}]}, 422, "the value is missing"),
        ({"rows": [{**GOOD, "age": {"deep": [1]}}]}, 422, "no finite number"),
        ({"rows": [GOOD] * 51}, 413, "there are 51 rows, and at most 50"),
        (b" " * 20_001, 413, "larger than 20000 bytes"),
    ],
)
def test_a_bad_request_gets_a_sentence_and_leaves_the_server_up(served, body, status, words):
    found, answer = served.predict(body)
    assert (found, list(answer)) == (status, ["error"]) and words in answer["error"], answer
    assert served.predict({"rows": [GOOD]})[0] == 200


def test_a_body_without_a_length_is_limited_too(served):
    parts = (b" " * 5000 for _ in range(6))
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", "/predict", parts, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413 and "larger than" in json.loads(answer.read())["error"]
    connection.close()
    assert served.ask("GET", "/health")[0] == 200


def test_unknown_paths_other_methods_and_other_hosts(served):
    assert served.ask("GET", "/nothing")[0] == 404
    assert served.ask("GET", "/predict")[0] == 405
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", "/", headers={"Host": "rebound.example"})
    assert connection.getresponse().status == 400
    connection.close()


def test_what_takes_too_long_is_given_up(wards, monkeypatch):
    calm = service.predict

    def slow(model, x, prior=None):
        time.sleep(0.6 if len(x) == 2 else 0)
        return calm(model, x)

    monkeypatch.setattr(service, "predict", slow)
    with Served(wards, "south", LIMITS._replace(seconds=0.3)) as server:
        status, answer = server.predict({"rows": [GOOD, GOOD]})
        assert status == 503 and "took longer than 0.3 seconds" in answer["error"]
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slowly:
            slowly.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{")
            assert b"408" in slowly.recv(4096).split(b"\r\n")[0]
        assert server.predict({"rows": [GOOD]})[0] == 200


def test_a_model_without_experts_and_a_port_in_use(tmp_path):
    result = fedmoe.run(tiny_config("fedavg", rounds=1), federation=tiny_federation(), directory=tmp_path / "run")
    with Served(result, 0) as server:
        status, answer = server.predict({"rows": [[0, 1, 2, 3]]})
        assert status == 200 and answer["experts"] is None and answer["class_names"] == ["0", "1", "2"]
        with pytest.raises(RunError, match=f"port {server.port} cannot be used: .*Choose another with --port"):
            listen(server.port)


def test_a_metric_that_is_not_defined_for_a_client_is_null(wards):
    scores = [{**score, "metrics": {"auc": nan}} for score in wards.data["scores"]]
    with Served(replace(wards, data={**wards.data, "scores": scores}), "coast") as server:
        status, answer = server.ask("GET", "/")
    assert status == 200 and {score["metrics"]["auc"] for score in answer["scores"]} == {None}
