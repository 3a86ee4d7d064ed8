"""What a config would do before it does it: which backend, why, and about how long."""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fedmoe import assembly
from fedmoe.assembly import Parts
from fedmoe.config import ExperimentConfig
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.embedded import default_workers
from fedmoe.engines.session import Session
from fedmoe.training.backends import Backend, reason


class Explanation(NamedTuple):
    """`seconds_per_round` was measured on a few rounds that are thrown away; None where clients never talk."""

    backend: Backend
    why: str
    weights: int
    layers: list[str]  # of the native program; empty on the other backends
    workers: int
    rounds: int
    seconds_per_round: float | None
    notes: list[str]  # what falls back from whole native epochs, what is missing


def explain(config: ExperimentConfig) -> Explanation:
    parts = assembly.build(config)
    backend = parts.backend
    asked = config.engine.backend != "auto"
    why = f"engine.backend={backend!r} asks for it" if asked else reason((parts.expert, parts.gate), backend)
    on_cpu = parts.device.type == "cpu"
    if not on_cpu:
        why = f"it is what computes on engine.device={parts.device.type!r}"
    layers = [layer.describe() for layer in parts.expert.program.layers] if backend == "native" else []
    talks = bool(parts.algorithm.round)
    return Explanation(
        backend,
        why,
        parts.expert.num_weights,
        layers,
        config.engine.workers or (default_workers() if on_cpu else 1),
        config.schedule.rounds if talks else 0,
        _time_round(parts) if talks else None,
        [*parts.notes, *parts.fallback_notes()],
    )


TIMED_ROUNDS, TIMED_SECONDS = 5, 2.0  # the fastest of so many rounds, or of as many as fit into so many seconds


def _time_round(parts: Parts) -> float:
    """After a first round, which also pays for warming up. None is the last, which may also validate."""
    endless = parts.config.schedule.model_copy(update={"rounds": 10**9})
    parts = replace(parts, config=parts.config.model_copy(update={"schedule": endless}))
    with TemporaryDirectory() as folder, open_transport(parts, Path(folder) / "private.sqlite", "explain") as transport:
        session = Session(parts, transport)
        session.next_round()
        lasted: list[float] = []
        while len(lasted) < TIMED_ROUNDS and sum(lasted) < TIMED_SECONDS:
            begun = time.monotonic()
            session.next_round()
            lasted.append(time.monotonic() - begun)
        return min(lasted)
