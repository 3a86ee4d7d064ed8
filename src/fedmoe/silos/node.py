"""One client on its own machine: a worker behind a node's own rules.

Whatever a message asks for, nothing is done for another client, scores and private parts leave only where this node
agrees, and an error of any kind is a reply in words: the server goes on with the others.
"""

import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedmoe import assembly
from fedmoe.assembly import Parts
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId
from fedmoe.deployment.programs import Untraceable, traced
from fedmoe.engines.flower.hello import is_hello, reply_to_hello
from fedmoe.engines.flower.post import error_frame
from fedmoe.engines.worker import Worker
from fedmoe.errors import FedmoeError, MessageError, RunError
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.framing import Bytes, unpack
from fedmoe.silos.journal import Journal
from fedmoe.silos.silo_data import node_federation
from fedmoe.storage.files import make_private_folder, write_atomically

RUN_ID = re.compile("[0-9a-f]{32}")  # it names a folder


class Agreement(NamedTuple):
    """What this node sends beside updates. The config must ask for it, and the node must agree."""

    scores: bool = False
    release: bool = False


class SiloNode:
    """Keeps everything under `home`: of each run a folder with private states, replies, and the model in the end."""

    def __init__(self, config: ExperimentConfig, client: ClientId, data: Any, home: Path, agreement: Agreement) -> None:
        self.client, self.home = client, home
        parts = assembly.build(config, federation=node_federation(config, client, data))
        self._parts = replace(parts, config=_agreed(parts, agreement))
        self._runs: dict[str, tuple[Worker, Journal]] = {}

    def handle(self, envelope: dict[str, Any], frame: Bytes) -> Bytes:
        try:
            return self._handle(envelope, frame)
        except FedmoeError as error:
            return error_frame(str(error), type(error).__name__)
        except Exception as error:  # such as broadcasts of shapes that this algorithm stumbles on
            return error_frame(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for worker, journal in self._runs.values():
            worker.close()
            journal.close()
        self._runs = {}

    def _handle(self, envelope: dict[str, Any], frame: Bytes) -> Bytes:
        if is_hello(frame):
            return reply_to_hello(self.client)
        header, _ = unpack(frame)
        run_id, attempt = envelope.get("run"), envelope.get("attempt")
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id) or type(attempt) is not int or attempt < 0:
            raise MessageError("the envelope of a message names no run and attempt.")
        named = [row[0] for row in header.get("states", [[self.client]])]
        if header.get("clients") != [self.client] or named != [self.client]:
            raise MessageError(f"a message is for clients {header.get('clients')}, but this node serves {self.client}.")
        worker, journal = self._run(run_id)
        journal.begin(attempt)
        return journal.once(attempt, frame, worker.handle) if header.get("do") == "exchange" else worker.handle(frame)

    def _run(self, run_id: str) -> tuple[Worker, Journal]:
        if run_id not in self._runs:
            folder = self.home / "runs" / run_id
            make_private_folder(folder)
            keep = partial(self._keep_model, folder / "model.pt2")
            worker = Worker(self._parts, folder / "private.sqlite", run_id, keep_model=keep)
            self._runs[run_id] = worker, Journal(folder / "replies.sqlite")
        return self._runs[run_id]

    def _keep_model(self, path: Path, model: PersonalModel, client: ClientId) -> None:
        """As a file that runs without fedmoe: `torch.export.load(path).module()(x)`."""
        x = self._parts.federation.load(client).train.x[:2]
        program = io.BytesIO()
        try:
            torch.export.save(traced(model, torch.cat([x, x])[:2]), program)
        except Untraceable as error:
            raise RunError(f"the personal model of client {client} cannot be exported: {error}.") from error
        write_atomically(path, program.getvalue())


def _agreed(parts: Parts, agreement: Agreement) -> ExperimentConfig:
    """The worker decides by its own config what it sends."""
    config = parts.config
    if not agreement.scores:
        asked = config.evaluation.model_copy(update={"clients_asked": "none"})
        config = config.model_copy(update={"evaluation": asked})
    if not agreement.release:
        config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"release": False})})
    return config
