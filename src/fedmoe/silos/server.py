"""The ServerApp: the same run as `fedmoe run`, whose clients are nodes behind a Flower grid.

Its folder has a checkpoint of every round. A server that was killed is started again with resume = true: a new attempt,
which goes on from the last checkpoint, and whose nodes refuse whatever the attempts before it may still have sent.
"""

import logging
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmoe.assembly import Parts
from fedmoe.config import ExperimentConfig, read_config
from fedmoe.engines.extras import require
from fedmoe.engines.flower.grid import GridTransport, Nodes
from fedmoe.engines.flower.post import Post
from fedmoe.engines.steps import RoundRecord
from fedmoe.errors import ConfigError, FedmoeError, RunError
from fedmoe.experiment import Event, Started, run_events
from fedmoe.result import Result
from fedmoe.silos.place import CONFIG_FILE, silo_home
from fedmoe.silos.silo_data import server_federation
from fedmoe.storage.files import make_private_folder, write_atomically
from fedmoe.storage.rundir import RunDirectory

log = logging.getLogger("flwr")


def _log_rejections() -> None:
    """Who was rejected and why goes where Flower's own words go."""
    of_the_package = logging.getLogger("fedmoe")
    of_the_package.setLevel(logging.INFO)
    of_the_package.propagate = False
    of_the_package.handlers = log.handlers


def server_app(app: Path) -> Any:
    """`app` is the folder with the app's config."""
    made = require("flwr.serverapp", "flower").ServerApp()

    def main(grid: Any, context: Any) -> None:
        try:
            serve(grid, dict(context.run_config), app / CONFIG_FILE)
        except FedmoeError as error:
            log.error("%s: %s", type(error).__name__, error)
            raise

    made.main()(main)
    return made


def serve(grid: Any, run_config: dict[str, Any], config_file: Path) -> Result:
    _log_rejections()
    config = read_config(config_file)
    if config.engine.name != "flower":
        raise ConfigError(f"engine.name={config.engine.name!r} in {config_file.name}: an app of Flower needs 'flower'.")
    federation, home = server_federation(config), server_home(config, run_config)
    resume, personalize = bool(run_config.get("resume")), bool(run_config.get("personalize"))
    check_home(home, resume=resume or personalize)
    attempt = _next_attempt(home)

    def connect(parts: Parts, _store: Path, run_id: str) -> AbstractContextManager[GridTransport]:
        settings, schedule = config.engine.flower, config.schedule
        post = Post(grid, {"run": run_id, "attempt": attempt})
        nodes = Nodes(post, parts.federation.num_clients, min(settings.join_seconds, settings.deadline))
        limits = {"deadline": settings.deadline, "join_seconds": settings.join_seconds}
        return GridTransport(post, nodes, min_clients=schedule.min_clients, **limits)

    for event in run_events(config, home, federation=federation, command="flwr run", connect=connect):
        _say(event)
    assert isinstance(event, Result)
    if personalize:
        left = sorted(client for clients in event.session.leave_models() for client in clients)
        log.info("fedmoe: personal models lie on the nodes of clients %s", left)
    return event


def server_home(config: ExperimentConfig, run_config: dict[str, Any]) -> Path:
    return Path(str(run_config.get("directory") or silo_home() / "servers" / config.name)).expanduser()


def check_home(home: Path, *, resume: bool) -> None:
    """A new run needs a new folder; a resume one with a run of this version. Its config is compared by the run."""
    run = RunDirectory(home)
    try:
        recorded = run.read_config()
    except FileNotFoundError:
        if resume:
            raise RunError(f"{home} holds no run to go on with. Start one: flwr run.") from None
        return
    if not resume:
        raise RunError(
            f"{home} holds a run already. Go on with it: fedmoe flower resume; or begin another in another folder: "
            "flwr run --run-config 'directory=\"…\"'."
        )
    made_by = recorded["recorded"].get("versions", {}).get("fedmoe")
    if made_by != version("fedmoe"):
        raise RunError(
            f"the run in {home} was made by fedmoe {made_by}, and this is {version('fedmoe')}. Resume it with that one."
        )


def _next_attempt(home: Path) -> int:
    """Counted on disk before anything is sent."""
    make_private_folder(home)
    path = home / "attempt"
    number = int(path.read_text()) + 1 if path.exists() else 1
    write_atomically(path, str(number).encode())
    return number


def _say(event: Event) -> None:
    if isinstance(event, Started):
        log.info("fedmoe: %d rounds, from round %d on", event.rounds, event.resumed_from)
        for note in event.notes:
            log.info("fedmoe: %s", note)
    elif isinstance(event, RoundRecord):
        sent = len({client for sizes in event.sent.values() for client in sizes})
        log.info(
            "fedmoe: %s %d: %d of %d clients, %d rejected, %.1f s",
            event.phase, event.round, sent, len(event.clients), event.rejected, event.seconds,
        )  # fmt: skip
        for warning in event.warnings:
            log.warning("fedmoe: %s", warning)
    elif isinstance(event, Result):
        log.info("fedmoe: finished; the report is %s", event.directory / "report.html")
