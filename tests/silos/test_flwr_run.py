"""How `fedmoe flower resume` ends, with a program in Flower's place."""

from pathlib import Path

import pytest

from fedmoe.errors import RunError
from fedmoe.silos import flwr_run
from fedmoe.silos.flwr_run import run_app

SCRIPT = """#!/bin/sh
echo "$@" >> {folder}/asked
if [ "$1" = list ]; then echo '{{"success": true, "runs": [{{"run-id": "7", "status": "'{status}'"}}]}}'; exit 0; fi
{run}
"""
STARTS = 'echo "Successfully started run 7"; echo "fedmoe: round 1"'


def fake_flwr(folder: Path, monkeypatch: pytest.MonkeyPatch, run: str, status: str = "finished:completed") -> None:
    path = folder / "flwr"
    path.write_text(SCRIPT.format(folder=folder, run=run, status=status))
    path.chmod(0o700)
    monkeypatch.setattr(flwr_run, "program", lambda name: str(folder / name))
    monkeypatch.setattr(flwr_run, "PAUSE", 0.01)


def test_what_the_run_says_is_shown_and_its_end_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_flwr(tmp_path, monkeypatch, STARTS)
    run_app(Path("silo_app"), "silos", "/srv/run1", "resume=true")
    assert "fedmoe: round 1" in capsys.readouterr().out
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [
        'run silo_app silos --run-config resume=true directory="/srv/run1" --stream',
        "list silos --run-id 7 --format json",
    ]


@pytest.mark.parametrize(
    ("run", "status", "sentence"),
    [
        (STARTS, "finished:failed", "run 7 of Flower is finished:failed; what it said is above"),
        (STARTS, "running", "run 7 of Flower is running"),
        ("exit 3", "", "`flwr run` ended with 3"),
        ("echo nothing", "", "`flwr run` ended with 0"),
    ],
)
def test_a_run_that_does_not_end_well_is_an_error(
    run: str, status: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flwr(tmp_path, monkeypatch, run, status)
    with pytest.raises(RunError, match=sentence):
        run_app(Path("silo_app"), "", "", "personalize=true")
