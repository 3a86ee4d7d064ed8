"""The Ray engine: the embedded engine's workers as actors of a Ray cluster, for simulations that outgrow one machine.

An actor builds the parts of the run itself, from the config and whatever Python objects were given with it, so that
data are read where they are used. What travels in a round are frames, as bytes. An actor that is lost is replaced and
its cohort run again; a frame names the state versions that it starts from, so that changes no bit.

A cluster is one circle of trust: Ray starts actors by pickling their arguments, and does not encrypt by itself.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmoe import assembly
from fedmoe.assembly import Given, Parts
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import Bytes
from fedmoe.engines.embedded import default_workers, keep_freed_memory
from fedmoe.engines.extras import require
from fedmoe.engines.local_ray import prepare_environment, start_local_ray
from fedmoe.engines.ray_store import Keeper, RemoteLedger, RemoteStore
from fedmoe.engines.retries import Retries
from fedmoe.engines.worker import Worker
from fedmoe.errors import ConfigError, FedmoeError, RunError
from fedmoe.evaluation.personal_model import PersonalModel

STARTING_SECONDS = 600.0  # for all actors: each imports torch and reads its data
CONNECTING_SECONDS = 10.0


class WorkerActor:
    """A worker in a process of the cluster. Frames are arrays of bytes, which Ray passes without pickling them."""

    def __init__(self, table: dict[str, Any], given: Given, store: Path, run_id: str, home: str, keeper: Any) -> None:
        torch.set_num_threads(1)  # as in the embedded engine: with more, sums would run in another order
        keep_freed_memory()
        at_home = require("ray", "ray").get_runtime_context().get_node_id() == home
        self._error: FedmoeError | None = None
        try:
            parts = assembly.rebuild(table, given)
            elsewhere: dict[str, Any] = {
                "open_store": lambda *_: RemoteStore(keeper),
                "open_ledger": lambda *_: RemoteLedger(keeper),
            }
            self._worker = Worker(parts, store, run_id, **({} if at_home else elsewhere))
        except FedmoeError as error:  # such as data that are not on this machine
            self._error = error

    def obstacle(self) -> str | None:
        """Why this actor cannot work."""
        return None if self._error is None else str(self._error)

    def handle(self, frame: Any) -> Any:
        return np.frombuffer(self._worker.handle(memoryview(frame)), np.uint8)


class RayPool:
    """Whichever actor is free gets the next frame; nothing depends on which that is."""

    trusted = True  # the cluster runs this program
    one_store = True

    def __init__(self, parts: Parts, store: Path, run_id: str) -> None:
        self.ray = require("ray", "ray")
        self._parts, self._store, self._run_id = parts, store, run_id
        self._settings = parts.config.engine
        self._worker = Worker(parts, store, run_id)  # of this process: it makes the store, and reads models from it
        self._actors: list[Any] = []
        self._keeper: Any = None
        self._given: Any = None  # in the cluster's object store, once for all actors
        self._started_ray = False

    def __enter__(self) -> "RayPool":
        try:
            self._connect()
            self._given = self.ray.put(self._parts.given)
            self._actors = [self._new_actor() for _ in range(self._num_actors())]
            for obstacle in self._within(STARTING_SECONDS, [actor.obstacle.remote() for actor in self._actors]):
                if obstacle:
                    raise RunError(f"an actor of the Ray cluster could not start: {obstacle}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in [*self._actors, *([self._keeper] if self._keeper else [])]:
            with suppress(Exception):  # it is gone
                self.ray.kill(actor)
        self._actors, self._keeper, self._given = [], None, None
        self._worker.close()
        if self._started_ray:
            self.ray.shutdown()
            self._started_ray = False

    def run(self, frames: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
        work = Retries(frames, self._settings.retries)
        idle, busy = list(range(len(self._actors))), dict[Any, tuple[int, int]]()
        while work.waiting or busy:
            while work.waiting and idle:
                place = idle.pop()
                index, frame = work.next()
                busy[self._actors[place].handle.remote(np.frombuffer(frame, np.uint8))] = (index, place)
            (ready, *_), _ = self.ray.wait(list(busy), num_returns=1)
            index, place = busy.pop(ready)
            idle.append(place)
            try:
                reply = self.ray.get(ready)
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
                self._replace(place)
                work.lost(index, f"an actor of the Ray cluster was lost ({type(error).__name__})")
                continue
            yield index, memoryview(reply)

    def personal_model(self, delivered: Tree, client: ClientId, state: int, final: int | None) -> PersonalModel:
        return self._worker.personal_model(delivered, client, state, final)

    def _connect(self) -> None:
        """To the cluster of the config; else to a Ray that this program has begun already, or to one of its own."""
        if self.ray.is_initialized():
            return
        address = self._settings.address
        try:
            if address:
                prepare_environment()
                _require_listener(address)
                self.ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            else:
                start_local_ray(self.ray, self._settings.workers or default_workers())
        except (OSError, RuntimeError, ValueError) as error:
            where = f"engine.address={address!r}" if address else "this machine"
            raise ConfigError(
                f"no Ray cluster could be reached at {where}: {error}. Start one (ray start --head) and give its "
                "address, or leave engine.address away."
            ) from error
        self._started_ray = True

    def _num_actors(self) -> int:
        cores = int(self.ray.cluster_resources().get("CPU", 0))
        wanted = self._settings.workers or cores
        if not 1 <= wanted <= cores:
            raise ConfigError(f"engine.workers={wanted}, but the Ray cluster has {cores} CPUs. Ask for at most these.")
        return wanted

    def _new_actor(self) -> Any:
        """On any machine of the cluster where there are several; else here, beside the file of private states."""
        home = self.ray.get_runtime_context().get_node_id()
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        strategies = require("ray.util.scheduling_strategies", "ray")
        beside = strategies.NodeAffinitySchedulingStrategy(home, soft=False)
        options: dict[str, Any] = {"num_cpus": 1}
        if len(alive) == 1:
            options["scheduling_strategy"] = beside
        elif self._keeper is None:
            keeper = self.ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=beside, max_restarts=-1)
            self._keeper = keeper.remote(self._store.absolute(), self._run_id)
        actor = self.ray.remote(WorkerActor).options(**options)
        table = self._parts.config.model_dump(mode="json")
        return actor.remote(table, self._given, self._store.absolute(), self._run_id, home, self._keeper)

    def _replace(self, place: int) -> None:
        with suppress(Exception):
            self.ray.kill(self._actors[place])
        self._actors[place] = self._new_actor()

    def _within(self, seconds: float, refs: Sequence[Any]) -> list[Any]:
        try:
            results: list[Any] = self.ray.get(list(refs), timeout=seconds)
        except self.ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"the actors did not start within {seconds:.0f} seconds: the cluster's CPUs may be taken by other "
                "programs. Free some, or ask for fewer engine.workers."
            ) from error
        return results


def _require_listener(address: str) -> None:
    """Ray itself would try for minutes to reach a machine where nobody listens."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECTING_SECONDS).close()


def open_transport(parts: Parts, store: Path, run_id: str) -> RayPool:
    return RayPool(parts, store, run_id)
