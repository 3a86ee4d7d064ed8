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
    assert killed_at(
        {"private_expert": 16, "pruned_experts": 16}[name], subject, tmp_path / "parts", checkpoint_every=4
    )
    rounds_written = {version for _, _, version in read_private(RunDirectory(tmp_path / "parts").private_store)}
    assert len(rounds_written) >= 2
    assert end_state(run(subject, tmp_path / "parts", checkpoint_every=1)) == expected


def test_killed_workers_are_replaced_and_where_that_does_not_help_the_run_is_resumed(tmp_path: Path) -> None:
    subject = Subject.of(PROBES["pruned_experts"])
    expected = end_state(run(subject, tmp_path / "whole", workers=2))
    with pytest.raises(RunError, match="exit code -9"):  # every worker dies before its first client
        run(subject, tmp_path / "parts", workers=2, federation=KillingFederation.make(at_call=1))
    assert end_state(run(subject, tmp_path / "parts", workers=2, federation=KillingFederation.make(3))) == expected
