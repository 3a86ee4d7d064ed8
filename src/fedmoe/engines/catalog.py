"""The only list of engines: name -> how its transport is opened. A new one is a file, its settings and a line here."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedmoe.assembly import Parts
from fedmoe.engines import embedded, ray_pool
from fedmoe.engines.flower import simulation

# parts, the file of private states, the id of the run -> a `Transport` that is open within a `with`
Connect = Callable[[Parts, Path, str], AbstractContextManager[Any]]

ENGINES: dict[str, Connect] = {
    "embedded": embedded.open_transport,
    "ray": ray_pool.open_transport,
    "flower": simulation.open_transport,
}


def open_transport(parts: Parts, store: Path, run_id: str) -> AbstractContextManager[Any]:
    return ENGINES[parts.config.engine.name](parts, store, run_id)
