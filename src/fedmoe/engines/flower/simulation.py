"""`engine.name = "flower"` in `fedmoe run`: the config's clients as the virtual nodes of Flower's simulation.

For comparing engines, and for trying what will run on real silos: each client is a message of its own, in processes
that Flower starts through Ray. For speed take the embedded engine.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedmoe import assembly
from fedmoe.assembly import Parts
from fedmoe.engines.embedded import default_workers, keep_freed_memory
from fedmoe.engines.extras import require
from fedmoe.engines.flower.environment import prepare_environment
from fedmoe.engines.flower.grid import Nodes, SharedStoreTransport
from fedmoe.engines.flower.hello import is_hello, reply_to_hello
from fedmoe.engines.flower.post import Post, error_frame
from fedmoe.engines.flower.records import to_frame, to_records
from fedmoe.engines.local_ray import start_local_ray
from fedmoe.engines.replies import shown_reason
from fedmoe.engines.worker import Worker
from fedmoe.errors import RunError

STARTING_SECONDS = 300.0  # for Ray and Flower's runtime
MAX_BYTES = 16 << 30  # of one message, within this machine

_workers: dict[str, Worker] = {}  # of this process of the simulation, by run


@contextmanager
def open_transport(parts: Parts, store: Path, run_id: str) -> Iterator[SharedStoreTransport]:
    """A simulation with a node for each client that could be asked; it ends with the transport."""
    runs = {run_id: (parts, store)}
    with simulated_grid(parts, runs) as grid, shared_transport(grid, parts, store, run_id) as transport:
        yield transport


@contextmanager
def shared_transport(grid: Any, parts: Parts, store: Path, run_id: str) -> Iterator[SharedStoreTransport]:
    worker, settings = Worker(parts, store, run_id), parts.config.engine.flower
    post = Post(grid, {"run": run_id, "attempt": 0})
    everyone = parts.federation.num_clients + parts.federation.num_unseen
    limits = {"deadline": settings.deadline, "join_seconds": settings.join_seconds}
    try:
        with SharedStoreTransport(post, Nodes(post, everyone), worker, min_clients=everyone, **limits) as transport:
            yield transport
    finally:
        worker.close()


@contextmanager
def simulated_grid(parts: Parts, runs: dict[str, tuple[Parts, Path]]) -> Iterator[Any]:
    """The grid of a simulation whose nodes serve these runs, each with its parts and its file of private states."""
    prepare_environment()
    ray, serverapp = require("ray", "flower"), require("flwr.serverapp", "flower")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cores = parts.config.engine.workers or default_workers()
    if not ray.is_initialized():
        start_local_ray(ray, cores)
    recipes = {run: (p.config.model_dump(mode="json"), p.given, store.absolute()) for run, (p, store) in runs.items()}
    recipe = ray.put(recipes)  # once, not with every message
    grids: queue.Queue[Any] = queue.Queue()
    ended = threading.Event()
    server = serverapp.ServerApp()

    def main(grid: Any, context: Any) -> None:
        grids.put(grid)
        ended.wait()

    server.main()(main)

    def run() -> None:
        try:
            everyone = parts.federation.num_clients + parts.federation.num_unseen
            backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
            simulation = require("flwr.simulation", "flower")
            simulation.run_simulation(server, _client_app(recipe), everyone, backend_config=backend)
        except BaseException as error:
            grids.put(error)

    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)
    thread.start()
    try:
        yield _started(grids)
    finally:
        ended.set()
        thread.join(STARTING_SECONDS)
        torch.set_num_threads(threads)


def _started(grids: "queue.Queue[Any]") -> Any:
    try:
        grid = grids.get(timeout=STARTING_SECONDS)
    except queue.Empty:
        raise RunError(f"Flower's simulation did not start within {STARTING_SECONDS:g} seconds.") from None
    if isinstance(grid, BaseException):
        raise RunError(f"Flower's simulation did not start: {shown_reason(str(grid))}") from grid
    return grid


def _client_app(recipe: Any) -> Any:
    """A ClientApp whose client is the virtual node's number."""
    app = require("flwr.clientapp", "flower").ClientApp()

    def handle(message: Any, context: Any) -> Any:
        frame, envelope = to_frame(message.content, MAX_BYTES)
        client = int(context.node_config["partition-id"])
        try:
            reply = reply_to_hello(client) if is_hello(frame) else _worker(recipe, envelope["run"]).handle(frame)
        except Exception as error:  # a defect of ours, to be raised where the run is
            reply = error_frame(f"{type(error).__name__}: {error}")
        return require("flwr.app", "flower").Message(to_records(reply, envelope), reply_to=message)

    for kind in (app.train, app.evaluate, app.query):
        kind()(handle)
    return app


def _worker(recipe: Any, run_id: str) -> Worker:
    if run_id not in _workers:
        torch.set_num_threads(1)
        keep_freed_memory()
        table, given, store = require("ray", "flower").get(recipe)[run_id]
        _workers[run_id] = Worker(assembly.rebuild(table, given), store, run_id)
    return _workers[run_id]
