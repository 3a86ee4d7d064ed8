"""A service on a port of this machine, reachable from this machine alone."""

import socket
from collections.abc import Callable
from math import isnan
from typing import Any

import uvicorn
from starlette.applications import Starlette

from fedmoe.deployment.predictions import reader_of
from fedmoe.deployment.service import make_app
from fedmoe.errors import RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.result import Result

HOST = "127.0.0.1"
MOST_REQUESTS = 64  # under way at once; more are answered with 503
KEEP_ALIVE = END = 5  # seconds: an idle connection is kept, and open requests have to end


def app_of(result: Result, model: PersonalModel) -> Starlette:
    return make_app(model, reader_of(result), about(result, model))


def about(result: Result, model: PersonalModel) -> dict[str, Any]:
    """The facts of the model card, as JSON."""
    table, number = result.federation.table, result.federation.number_of(model.facts.client)
    return {
        "client": model.facts.client,
        "algorithm": model.facts.algorithm,
        "run": {"name": result.data["name"], "id": result.data.get("run_id"), "versions": result.data["versions"]},
        "class_names": list(model.facts.class_names),
        "row": {"shape": list(model.facts.input_shape), "dtype": str(model.facts.input_dtype).removeprefix("torch.")},
        "columns": None if table is None else [column.name for column in table.features],
        "scores": [_as_json(score) for score in result.scores if score.client == number],
        "use": 'POST /predict {"rows": [...]}, each row a list of numbers'
        + ("" if table is None else ", or an object with these columns"),
    }


def _as_json(score: Score) -> dict[str, Any]:
    """JSON has no NaN, which is what a metric is that is not defined, such as the AUC of a single class."""
    metrics = {name: None if isnan(value) else value for name, value in score.metrics.items()}
    return {**score.as_dict(), "metrics": metrics}


def listen(port: int) -> socket.socket:
    """A socket that is bound already, so that a port in use is said before anything is served. 0: any free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise RunError(
            f"port {port} cannot be used: {error.strerror}. Choose another with --port, or 0 for any that is free."
        ) from error
    return listener


def serve(app: Starlette, listener: socket.socket, started: Callable[[uvicorn.Server], None] | None = None) -> None:
    """Until it is interrupted, or told to end by `should_exit` of the server that `started` is given."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", limit_concurrency=MOST_REQUESTS,
        timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=END, server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    if started:
        started(server)
    server.run(sockets=[listener])
