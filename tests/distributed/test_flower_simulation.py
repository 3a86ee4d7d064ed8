"""Flower's simulation against the embedded engine. It needs the extra `flower`, and minutes: `make slow`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import RUN_ID, make_common_expert, make_expert, make_gate, tiny_config, tiny_federation
from fedmoe import assembly, trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.assembly import Parts
from fedmoe.clients.privacy_ledger import PrivacyLedger, ledger_beside
from fedmoe.core_types import Tensors
from fedmoe.engines.catalog import open_transport
from fedmoe.privacy_choice import PrivacyConfig
from fedmoe.private_steps import Charge
from fedmoe.testing.checks import TOLERANCE
from fedmoe.testing.outcome import Outcome, run_session

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'fedmoe[flower]'")
simulation = pytest.importorskip("fedmoe.engines.flower.simulation")
pytestmark = [
    pytest.mark.slow,
    # Of Ray and Flower: files that they leave open, and news of their future.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


PRIVATE = "domain_experts-private"  # a run of the grid


def parts_of(name: str, engine: str) -> Parts:
    config = tiny_config(name.removesuffix("-private"), rounds=3, workers=2)
    privacy = PrivacyConfig(sampling_rate=0.5, noise_multiplier=1.0, noise_source="seeded") if name == PRIVATE else None
    changed = {"engine": config.engine.model_copy(update={"name": engine}), "privacy": privacy}
    config = config.model_copy(update=changed)
    own = {"expert": make_expert, "gate": make_gate, "common_expert": make_common_expert()}
    return assembly.build(config, federation=tiny_federation(), **own)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """One simulation whose nodes serve a run of every algorithm: to start one takes longer than to run it."""
    folder = tmp_path_factory.mktemp("flower")
    runs = {name: (parts_of(name, "flower"), folder / name / "store") for name in (*CATALOG, PRIVATE)}
    with simulation.simulated_grid(runs["fedavg"][0], runs) as made:
        yield made, folder


def everything_in(outcome: Outcome) -> Tensors:
    delivered = {str(client): broadcast for client, broadcast in outcome.delivered.items()}
    public = trees.to_named({"server": outcome.server, "delivered": delivered})
    return public | outcome.private_tensors()


def assert_close(ours: Outcome, embedded: Outcome) -> None:
    found, expected = everything_in(ours), everything_in(embedded)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    assert [record.clients for record in ours.records] == [record.clients for record in embedded.records]
    assert not ours.manifest["rejected"]


@pytest.mark.parametrize("name", [*sorted(CATALOG), PRIVATE])
def test_equal_to_the_embedded_engine(name: str, tmp_path: Path, grid: tuple[Any, Path]) -> None:
    made, folder = grid
    parts, store = parts_of(name, "flower"), folder / name / "store"
    with simulation.shared_transport(made, parts, store, name) as transport:
        ours = run_session(parts, transport, store)
    parts = parts_of(name, "embedded")
    with open_transport(parts, tmp_path / "store", RUN_ID) as transport:
        embedded = run_session(parts, transport, tmp_path / "store")
    assert_close(ours, embedded)
    if name == PRIVATE:
        spent = [charges_of(*one) for one in ((store, name), (tmp_path / "store", RUN_ID))]
        assert spent[0] == spent[1] != {}


def charges_of(store: Path, run_id: str) -> dict[int, list[Charge]]:
    ledger = PrivacyLedger(ledger_beside(store), run_id)
    found = {client: ledger.charges(client) for client in ledger.clients()}
    ledger.close()
    return found
