"""The Ray engine on a Ray of this machine. It needs the extra `ray`, and minutes: `make slow`."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import RUN_ID, make_common_expert, make_expert, make_gate, tiny_config, tiny_federation
from fedmoe import assembly
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.assembly import Parts
from fedmoe.clients.privacy_ledger import PrivacyLedger, ledger_beside
from fedmoe.engines import ray_pool
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.local_ray import start_local_ray
from fedmoe.engines.ray_pool import RayPool
from fedmoe.errors import ConfigError
from fedmoe.privacy_choice import PrivacyConfig
from fedmoe.private_steps import Charge
from fedmoe.testing.outcome import Outcome, run_session

ray = pytest.importorskip("ray", reason="the extra ray is not installed: pip install 'fedmoe[ray]'")
pytestmark = [
    pytest.mark.slow,
    # Ray's own: files that it leaves open, and news of its future.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORKERS = 2


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for the tests of this file: the engine uses what is there."""
    start_local_ray(ray, WORKERS)
    yield
    ray.shutdown()


def parts_of(name: str, engine: str, *, private: bool = False, **engine_settings: Any) -> Parts:
    config = tiny_config(name, rounds=3, workers=WORKERS)
    changed = config.engine.model_copy(update={"name": engine, **engine_settings})
    privacy = PrivacyConfig(sampling_rate=0.5, noise_multiplier=1.0, noise_source="seeded") if private else None
    config = config.model_copy(update={"engine": changed, "privacy": privacy})
    own = {"expert": make_expert, "gate": make_gate, "common_expert": make_common_expert()}
    return assembly.build(config, federation=tiny_federation(), **own)  # type: ignore[arg-type]


def outcome_of(parts: Parts, store: Path) -> Outcome:
    with open_transport(parts, store, RUN_ID) as transport:
        return run_session(parts, transport, store)


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_equal_to_the_embedded_engine_to_the_last_bit(name: str, tmp_path: Path, local_ray: None) -> None:
    ours = outcome_of(parts_of(name, "ray"), tmp_path / "ray" / "store")
    embedded = outcome_of(parts_of(name, "embedded"), tmp_path / "embedded" / "store")
    assert ours.fingerprint() == embedded.fingerprint()


class KillsAnActor(RayPool):
    """Kills the process of an actor while it works: in the first call with several frames."""

    killed = 0

    def run(self, frames: Any) -> Any:
        replies = super().run(frames)
        if len(frames) > 1 and not self.killed:
            pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in self._actors])
            yield next(replies)
            os.kill(pids[0], signal.SIGKILL)
            os.kill(pids[1], signal.SIGKILL)
            self.killed = 2
        yield from replies


def test_a_lost_actors_cohort_is_run_again_from_the_state_it_had(tmp_path: Path, local_ray: None) -> None:
    parts = parts_of("fedrep", "ray", cohort_size=1)
    with KillsAnActor(parts, tmp_path / "ray" / "store", RUN_ID) as transport:
        ours = run_session(parts, transport, tmp_path / "ray" / "store")
        assert transport.killed
    embedded = outcome_of(parts_of("fedrep", "embedded", cohort_size=1), tmp_path / "embedded" / "store")
    assert ours.fingerprint() == embedded.fingerprint()


def test_the_object_store_does_not_grow_over_500_rounds(
    tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of 300 kB, which go through the object store: 500 rounds of them are 600 MB."""

    class Echo:
        def __init__(self, *_: Any) -> None:
            pass

        def obstacle(self) -> None:
            return None

        def handle(self, frame: Any) -> Any:
            return np.array(frame)

    monkeypatch.setattr(ray_pool, "WorkerActor", Echo)

    def used() -> float:
        """What the object store itself says; `ray.available_resources` does not count what is in use."""
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        time.sleep(1.5)  # what is let go is freed a little later
        reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
        return float(reply.store_stats.object_store_bytes_used)

    frames = [np.random.default_rng(n).bytes(300_000) for n in range(4)]
    with RayPool(parts_of("fedavg", "ray"), tmp_path / "store", RUN_ID) as transport:
        before = used()
        for _ in range(500):
            assert len(dict(transport.run(frames))) == 4
        assert used() - before < 10 * 300_000
        kept = list(transport.run([*frames, *frames, *frames]))  # what a leak would look like
        assert len(kept) == 12 and used() - before > 10 * 300_000


def charges_of(store: Path) -> dict[int, list[Charge]]:
    ledger = PrivacyLedger(ledger_beside(store), RUN_ID)
    found = {client: ledger.charges(client) for client in ledger.clients()}
    ledger.close()
    return found


def test_a_lost_actor_that_had_paid_is_not_charged_again(tmp_path: Path, local_ray: None) -> None:
    parts = parts_of("domain_experts", "ray", private=True, cohort_size=1)
    with KillsAnActor(parts, tmp_path / "ray" / "store", RUN_ID) as transport:
        ours = run_session(parts, transport, tmp_path / "ray" / "store")
        assert transport.killed
    plain = parts_of("domain_experts", "embedded", private=True, cohort_size=1)
    embedded = outcome_of(plain, tmp_path / "embedded" / "store")
    assert ours.fingerprint() == embedded.fingerprint()
    assert charges_of(tmp_path / "ray" / "store") == charges_of(tmp_path / "embedded" / "store") != {}


@pytest.mark.parametrize(("name", "private"), [("fedrep", False), ("domain_experts", True)])
def test_actors_on_another_machine_reach_states_and_ledger(name: str, private: bool, tmp_path: Path) -> None:
    """Two Ray nodes on this machine: the actor of the second has the keeper between itself and the files."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        parts = parts_of(name, "ray", private=private, address=cluster.address, workers=1)
        ours = outcome_of(parts, tmp_path / "ray" / "store")
    finally:
        ray.shutdown()
        cluster.shutdown()
    embedded = outcome_of(parts_of(name, "embedded", private=private, workers=1), tmp_path / "embedded" / "store")
    assert ours.private and ours.fingerprint() == embedded.fingerprint()
    if private:
        assert charges_of(tmp_path / "ray" / "store") == charges_of(tmp_path / "embedded" / "store") != {}


def test_an_address_where_no_cluster_is_and_too_many_workers_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()
    with (
        pytest.raises(ConfigError, match=r"no Ray cluster could be reached at engine.address='127.0.0.1:1'.*ray start"),
        RayPool(parts_of("fedavg", "ray", address="127.0.0.1:1"), tmp_path / "store", RUN_ID),
    ):
        pass
