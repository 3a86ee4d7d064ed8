"""Cells side by side: every one is made once, whatever happens in between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedmoe.errors import RunError, Stopped
from fedmoe.report.sweep import write_grid
from fedmoe.sweeps import processes
from fedmoe.sweeps.outcome import gather
from fedmoe.sweeps.plan import is_finished, plan
from fedmoe.sweeps.processes import run_cells

from .test_plan import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def scores(cell):
    return json.loads((cell.directory / "results.json").read_bytes())["scores"]


def test_a_sweep_is_made_once_shares_rounds_and_reports_what_failed(config, tmp_path):
    cells = plan(config, {"split.share": [0.3, 0.6]}, [0], tmp_path / "out")
    odd = plan(config, {"split.num_clients": [100000]}, [0], tmp_path / "out")[:1]
    events = list(run_cells([*cells, *odd], processes=2))
    ended = {event.cell: event for event in events if event.stage in ("done", "failed")}
    assert [ended[n].stage for n in range(7)] == ["done"] * 6 + ["failed"]
    assert "examples" in ended[6].words or "rows" in ended[6].words
    began = {event.cell: event.done for event in reversed(events) if event.stage == "rounds"}
    shared = [n for n, cell in enumerate(cells) if "local_only" not in cell.label]
    assert sorted(began[n] for n in shared) == [0, 0, 3, 3], "one cell of each split trains the rounds"
    points, problems = gather([*cells, *odd])
    assert len(points) == 2 and len(problems) == 1 and "num_clients=100000" in problems[0]
    page = write_grid(points, tmp_path / "out", "Small", problems).read_text()
    assert "num_clients=100000" in page and "split.share" in page and "Fine-tuned" in page
    before = {cell.label: (cell.directory / "results.json").stat().st_mtime_ns for cell in cells}
    assert {event.stage for event in run_cells(cells)} == {"found"}
    assert before == {cell.label: (cell.directory / "results.json").stat().st_mtime_ns for cell in cells}


def test_a_cell_has_workers_where_cells_are_fewer_than_cores(config, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "default_workers", lambda: 2)
    changes = ["compare=['fine_tuned']", "schedule.rounds=2", "engine.cohort_size=1"]
    cells, deadline = plan(config, {}, [0], tmp_path / "out", changes), time.monotonic() + 60
    *_, last = run_cells(cells, processes=1, should_stop=lambda: time.monotonic() > deadline)
    assert last.stage == "done"


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_with_the_same_numbers(config, tmp_path):
    changes = ["compare=['fedavg']", "schedule.rounds=300"]  # enough that none ends before both have begun
    whole = plan(config, {}, [0, 1], tmp_path / "whole", changes)
    list(run_cells(whole, processes=2))
    halves = plan(config, {}, [0, 1], tmp_path / "halves", changes)
    begun: set[int] = set()

    with pytest.raises(Stopped, match="Run the same command again"):
        for event in run_cells(halves, processes=2, should_stop=lambda: len(begun) == 2):
            if event.done > 1:
                begun.add(event.cell)
    assert not any(map(is_finished, halves))
    rounds = [event.done for event in run_cells(halves, processes=2) if event.stage == "rounds"]
    assert min(rounds) > 0, "both resume from a checkpoint"
    assert [scores(one) for one in halves] == [scores(one) for one in whole]


@pytest.mark.slow
def test_processes_end_when_their_parent_is_killed(config, tmp_path):
    code = f"""
from pathlib import Path
from fedmoe.sweeps.plan import plan
from fedmoe.sweeps.processes import run_cells
for event in run_cells(plan(Path({str(config)!r}), {{}}, [0], Path({str(tmp_path / "out")!r}),
                            ["compare=['fedavg']", "schedule.rounds=100000"])):
    print(event.stage, event.done, flush=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    while parent.stdout.readline().strip() != "rounds 3":
        assert parent.poll() is None
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.communicate()
    assert children
    deadline = time.monotonic() + 60
    while any(_runs(int(child)) for child in children):
        assert time.monotonic() < deadline, "a process outlives its sweep"
        time.sleep(0.1)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.slow
def test_a_killed_process_fails_its_cell_and_no_other(config, tmp_path):
    cells = plan(config, {}, [0, 1], tmp_path / "out", ["compare=['fedavg']", "schedule.rounds=400"])
    failed = []
    children = None
    for event in run_cells(cells, processes=2):
        if children is None and event.stage == "rounds":
            pid = os.getpid()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            mine = [int(c) for c in children if b"cell_process" in Path(f"/proc/{c}/cmdline").read_bytes()]
            os.kill(mine[0], signal.SIGKILL)
        if event.stage == "failed":
            failed.append(event)
    assert len(failed) == 1 and "-9" in failed[0].words
    assert sum(map(is_finished, cells)) == 1


def test_nothing_to_report_is_an_error(tmp_path):
    with pytest.raises(RunError, match="nothing to report"):
        write_grid([], tmp_path, "Empty")
