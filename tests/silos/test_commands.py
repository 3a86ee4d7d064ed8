"""The commands that look at a run, on one that was made on nodes: what they need is here, or they say where it is."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from fedmoe.experiment import run_events
from fedmoe.silos.node import Agreement, SiloNode
from fedmoe.silos.silo_data import server_federation
from silos.apps import CLIENTS, client_rows, silo_config
from silos.test_node import Nodes, open_nodes
from test_cli import invoke


def run_on_nodes(folder: Path, algorithm: str, agreement: Agreement) -> Path:
    """The folder of the server's run."""
    config, nodes = silo_config(algorithm), Nodes(open_nodes(folder / "nodes", agreement, algorithm))
    for _ in run_events(
        config, folder / "server", federation=server_federation(config), connect=lambda *_: nullcontext(nodes)
    ):
        pass
    np.savez(folder / "new.npz", x=client_rows(1)[0][:3].numpy())
    return folder / "server"


@pytest.mark.parametrize(
    ("agreement", "words"), [(Agreement(), "agreed to send them: FedRep"), (Agreement(scores=True), "75.0→75.0")]
)
def test_a_server_has_all_that_reports_need(  # type: ignore[no-untyped-def]
    agreement: Agreement, words: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    run = run_on_nodes(tmp_path, "fedrep", agreement)
    report = invoke(monkeypatch, capfd, "report", run)
    assert report.code == 0 and words in report.out
    watched = invoke(monkeypatch, capfd, "watch", run, "--once")
    assert watched.code == 0 and "finished" in watched.out and "3 of 3" in watched.out
    privacy = invoke(monkeypatch, capfd, "privacy", run)
    assert privacy.code == 0 and "no guarantee" in privacy.out


def test_what_was_spent_is_told_by_the_nodes(tmp_path: Path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    config = silo_config("fedavg", privacy={"noise_multiplier": 2.0, "sampling_rate": 0.2, "expected_batch_size": 4.0})
    homes = [tmp_path / "nodes" / str(client) for client in range(CLIENTS)]
    nodes = Nodes({n: SiloNode(config, n, client_rows(n), home, Agreement()) for n, home in enumerate(homes)})
    for _ in run_events(
        config, tmp_path / "server", federation=server_federation(config), connect=lambda *_: nullcontext(nodes)
    ):
        pass
    on_server = invoke(monkeypatch, capfd, "privacy", tmp_path / "server")
    assert on_server.code == 2 and "on Flower each node keeps its own" in on_server.out
    (run,) = (homes[1] / "runs").iterdir()
    on_node = invoke(monkeypatch, capfd, "privacy", run)
    assert on_node.code == 0 and "no guarantee" not in on_node.out and "add or remove one record" in on_node.out


@pytest.mark.parametrize("algorithm", ["fedrep", "fine_tuned"])  # of private states, and of the local stage alone
def test_personal_models_and_labels_are_not_on_the_server(algorithm: str, tmp_path: Path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    run, rows = run_on_nodes(tmp_path, algorithm, Agreement(scores=True)), tmp_path / "new.npz"
    before = sorted(run.rglob("*"))
    for command in (
        ["predict", run, "--client", 1, "--data", rows],
        ["export", run, "--client", 1, "--to", tmp_path / "exported"],
        ["serve", run, "--client", 1],
    ):
        refused = invoke(monkeypatch, capfd, *command)
        assert refused.code == 2 and "each personal model is on its client's own node" in refused.out, refused.out
        assert "fedmoe flower personalize" in refused.out
    for command in (
        ["audit", "labels", run],
        ["run", run / "config.toml", "--dir", run],
        ["explain", run / "config.toml"],
    ):
        refused = invoke(monkeypatch, capfd, *command)
        assert refused.code == 2 and "num_clients=3 declares silos" in refused.out and "flwr run" in refused.out
    assert sorted(run.rglob("*")) == before


def test_a_model_that_is_the_same_for_all_is_on_the_server(tmp_path: Path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    run = run_on_nodes(tmp_path, "fedavg", Agreement())
    answered = invoke(monkeypatch, capfd, "predict", run, "--client", 1, "--data", tmp_path / "new.npz")
    assert answered.code == 0 and "p(2)" in answered.out
