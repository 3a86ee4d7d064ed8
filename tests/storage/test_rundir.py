import signal
import subprocess
import sys

import pytest

from fedmoe.errors import RunError
from fedmoe.storage.rundir import RunDirectory, read_results

CONFIG = {
    "name": "demo",
    "seed": 3,
    "data": {"name": "digits", "folder": None},
    "engine": {"backend": "sequential", "workers": 2},
    "schedule": {"rounds": 50, "checkpoint_every": 1},
    "compare": ("fedavg", "local_only"),
    "versions": {"torch": "2.13"},
}

HOLD = """
import sys
from pathlib import Path
from fedmoe.storage.rundir import RunDirectory
with RunDirectory(Path(sys.argv[1])).opened():
    print("open", flush=True)
    sys.stdin.read()
"""


def changed(**sections):
    return {
        **CONFIG,
        **{name: {**CONFIG[name], **value} if isinstance(value, dict) else value for name, value in sections.items()},
    }


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with directory.opened():
        yield directory


class TestClaim:
    def test_the_same_config_claims_the_directory_again(self, run):
        run.claim(CONFIG)
        assert run.claim(CONFIG)["seed"] == 3

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (changed(seed=4), "seed is 3 there and 4 here"),
            (changed(schedule={"rounds": 60}), "schedule.rounds is 50 there and 60 here"),
            (changed(data={"name": "cifar10"}), "data.name is 'digits' there and 'cifar10' here"),
            (changed(schedule={"release": True}), "schedule.release is None there and True here"),
            (changed(engine={"backend": "batched"}), "engine.backend is 'sequential' there and 'batched' here"),
        ],
    )
    def test_another_config_is_refused_by_the_key_that_differs(self, run, config, message):
        run.claim(CONFIG)
        with pytest.raises(RunError, match=f"belongs to another run: {message}.*--dir"):
            run.claim(config)

    def test_a_key_that_is_gone_is_a_difference_too(self, run):
        run.claim(changed(schedule={"release": True}))
        with pytest.raises(RunError, match=r"schedule.release is True there and None here"):
            run.claim(CONFIG)

    def test_where_and_how_fast_it_is_computed_is_free(self, run):
        run.claim(CONFIG)
        free = changed(
            name="other", engine={"workers": 8}, schedule={"checkpoint_every": 9}, compare=(), data={"folder": "there"},
            versions={"torch": "3.0"},
        )  # fmt: skip
        assert run.claim(free)["name"] == "demo"

    def test_an_automatic_way_is_the_recorded_one(self, run):
        run.claim(CONFIG)
        assert run.claim(changed(engine={"backend": "auto"}))["engine"]["backend"] == "sequential"

    def test_a_config_that_cannot_be_read_is_said(self, run):
        (run.path / "config.toml").write_text("seed = = 3")
        with pytest.raises(RunError, match=r"config.toml cannot be read"):
            run.claim(CONFIG)


class TestMetrics:
    def rounds(self, *numbers):
        return [{"event": "round", "round": number, "loss": 0.1 * number} for number in numbers]

    def test_events_come_back_in_order(self, run):
        assert run.read_metrics() == []
        run.append_metrics(self.rounds(1, 2))
        run.append_metrics(self.rounds(3))
        assert run.read_metrics() == self.rounds(1, 2, 3)

    @pytest.mark.parametrize("half", [b'{"event": "rou', b"{", b'{"event": "round", "round": 3}'])
    def test_a_half_written_line_is_ignored(self, run, half):
        run.append_metrics(self.rounds(1, 2))
        with run.metrics.open("ab") as file:
            file.write(half)
        assert run.read_metrics() == self.rounds(1, 2)
        run.forget_metrics_after(2, 9)
        run.append_metrics(self.rounds(3))
        assert run.read_metrics() == self.rounds(1, 2, 3)

    def test_a_resumed_run_forgets_what_it_will_do_again(self, run):
        run.append_metrics([*self.rounds(1, 2, 3), {"event": "score", "client": 0}])
        assert run.forget_metrics_after(2, 9) == self.rounds(1, 2) == run.read_metrics()


class TestOneProcessAtATime:
    def test_a_second_process_is_turned_away_until_the_first_has_ended(self, tmp_path):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with holder:
            assert holder.stdout.readline() == b"open\n"
            with pytest.raises(RunError, match="in use by another process"), RunDirectory(tmp_path).opened():
                pass
            holder.send_signal(signal.SIGKILL)  # even a killed process leaves no lock behind
        with RunDirectory(tmp_path).opened():
            pass

    def test_nor_can_one_process_open_it_twice(self, run):
        with pytest.raises(RunError, match="in use"), RunDirectory(run.path).opened():
            pass


def test_private_states_are_for_the_owner_only(run):
    assert run.private_store.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_cannot_be_a_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be a run directory"), RunDirectory(tmp_path / "file").opened():
        pass


def test_results_are_read_from_finished_runs_only(run):
    with pytest.raises(RunError, match="holds no finished run"):
        read_results(run.path)
    run.write_json(run.results, {"seed": 3})
    assert read_results(run.path) == {"seed": 3}
    run.results.write_text('{"seed": ')
    with pytest.raises(RunError, match=r"results.json cannot be read"):
        read_results(run.path)
