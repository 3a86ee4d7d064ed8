"""Stops and kills at places of their own; what holds for every algorithm is in `test_every_algorithm`."""

from pathlib import Path

import pytest

from builders import read_private
from contract.probes import PROBES
from fedmoe.errors import RunError
from fedmoe.storage.rundir import RunDirectory
from fedmoe.testing.resume import KillingFederation, end_state, killed_at, run
from fedmoe.testing.subject import Subject


@pytest.mark.parametrize("name", ["private_expert", "pruned_experts"])
def test_kill_between_checkpoints_and_resume_with_more_of_them(name: str, tmp_path: Path) -> None:
    """States of rounds that are run again must not drive out those that they start from."""
    subject = Subject.of(PROBES[name])
    expected = end_state(run(subject, tmp_path / "whole"))
    assert killed_at({"private_expert": 16, "pruned_experts": 8}[name], subject, tmp_path / "parts", checkpoint_every=4)
    rounds_written = {version for _, _, version in read_private(RunDirectory(tmp_path / "parts").private_store)}
    assert len(rounds_written) >= 2
    assert end_state(run(subject, tmp_path / "parts", checkpoint_every=1)) == expected


def test_a_worker_is_killed_and_the_run_resumed(tmp_path: Path) -> None:
    subject = Subject.of(PROBES["pruned_experts"])
    expected = end_state(run(subject, tmp_path / "whole", workers=2))
    for at_call in (4, 5):
        with pytest.raises(RunError, match="exit code -9"):
            run(subject, tmp_path / "parts", workers=2, federation=KillingFederation.make(at_call))
    assert end_state(run(subject, tmp_path / "parts", workers=2)) == expected
