import os
import re
import resource
import signal
import subprocess
import sys
import tomllib

import pytest

from fedmoe.errors import RunError
from fedmoe.storage.rundir import RunDirectory

CONFIG = {
    "name": "demo",
    "seed": 3,
    "data": {"name": "digits", "folder": None},
    "engine": {"backend": "sequential", "workers": 2},
    "schedule": {"rounds": 50, "checkpoint_every": 1},
    "compare": ("fedavg", "local_only"),
    "recorded": {"split_digest": "abc", "versions": {"torch": "2.13"}, "modules": {"expert": "123"}},
}

HOLD = """
import sys
from pathlib import Path
from fedmoe.storage.rundir import RunDirectory
with RunDirectory(Path(sys.argv[1])).opened():
    print("open", flush=True)
    sys.stdin.read()
"""

HOLD_AND_FORK = """
import os, signal, sys
from pathlib import Path
from fedmoe.storage.rundir import RunDirectory
reader, writer = os.pipe()
with RunDirectory(Path(sys.argv[1])).opened():
    if os.fork() == 0:
        print("forked", flush=True)
        os.write(writer, b"1")
        sys.stdin.read()
    else:
        os.read(reader, 1)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def changed(**sections):
    return {
        **CONFIG,
        **{name: {**CONFIG[name], **value} if isinstance(value, dict) else value for name, value in sections.items()},
    }


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with directory.opened():
        yield directory


class TestRecordedConfig:
    def test_a_new_run_gets_an_id_and_keeps_it(self, run):
        first = run.record_config(CONFIG)
        assert len(first["recorded"]["run_id"]) == 32 and first["seed"] == 3
        assert run.record_config(CONFIG) == first == tomllib.loads(run.config.read_text())

    def test_no_two_runs_have_the_same_id(self, tmp_path):
        ids = set()
        for name in "abc":
            with RunDirectory(tmp_path / name).opened():
                ids.add(RunDirectory(tmp_path / name).record_config(CONFIG)["recorded"]["run_id"])
        assert len(ids) == 3

    def test_a_setting_that_came_later_counts_as_its_default(self, run):
        run.record_config(CONFIG)
        new, defaults = changed(schedule={"decay": 0.0}), {"schedule": {"decay": 0.0}}
        assert run.record_config(new, defaults)["recorded"]["run_id"]
        with pytest.raises(RunError, match=r"schedule\.decay is 0\.0 there and 0\.1 here"):
            run.record_config(changed(schedule={"decay": 0.1}), defaults)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (changed(seed=4), "seed is 3 there and 4 here"),
            (changed(schedule={"rounds": 60}), "schedule.rounds is 50 there and 60 here"),
            (changed(data={"name": "cifar10"}), "data.name is 'digits' there and 'cifar10' here"),
            (changed(schedule={"release": True}), "schedule.release is None there and True here"),
            (changed(engine={"backend": "batched"}), "engine.backend is 'sequential' there and 'batched' here"),
            (changed(recorded={"split_digest": "x"}), "recorded.split_digest is 'abc' there and 'x' here"),
            (changed(recorded={"modules": {"expert": "9"}}), "recorded.modules.expert is '123' there and '9' here"),
        ],
    )
    def test_another_config_is_refused_by_the_key_that_differs(self, run, config, message):
        run.record_config(CONFIG)
        with pytest.raises(RunError, match=f"belongs to another run: {message}.*--dir"):
            run.record_config(config)

    def test_a_key_that_is_gone_is_a_difference_too(self, run):
        run.record_config(changed(schedule={"release": True}))
        with pytest.raises(RunError, match=r"schedule.release is True there and None here"):
            run.record_config(CONFIG)

    def test_where_and_how_fast_it_is_computed_is_free(self, run):
        run.record_config(CONFIG)
        free = changed(
            name="other", engine={"workers": 8}, schedule={"checkpoint_every": 9}, compare=(), data={"folder": "there"},
            recorded={"versions": {"torch": "3.0"}},
        )  # fmt: skip
        assert run.record_config(free)["name"] == "demo"

    def test_an_automatic_backend_is_the_recorded_one(self, run):
        run.record_config(CONFIG)
        assert run.record_config(changed(engine={"backend": "auto"}))["engine"]["backend"] == "sequential"

    @pytest.mark.parametrize("content", [b"seed = = 3", b"seed = '\xff'", b"a = " + b"[" * 100_000])
    def test_a_config_that_cannot_be_read_is_said(self, run, content):
        run.config.write_bytes(content)
        with pytest.raises(RunError, match=r"config.toml cannot be read"):
            run.record_config(CONFIG)

    @pytest.mark.parametrize(
        "content", ["", "split_digest = 'abc'", "recorded = 3", "[recorded]\nrun_id = 7", "[recorded]\nrun_id = '../x'"]
    )
    def test_a_config_without_an_id_is_altered_or_of_an_earlier_version(self, run, content):
        run.config.write_text(content)
        with pytest.raises(RunError, match=r"names no run.*earlier version"):
            run.record_config(CONFIG)

    def test_a_folder_in_its_place_is_said(self, run):
        run.config.mkdir()
        with pytest.raises(RunError, match=r"config.toml could not be read: a folder is in its place"):
            run.record_config(CONFIG)


class TestMetrics:
    def rounds(self, *numbers):
        return [{"event": "round", "round": number, "loss": 0.1 * number} for number in numbers]

    def test_events_come_back_in_order(self, run):
        assert run.read_metrics() == []
        run.append_metrics(self.rounds(1, 2))
        run.append_metrics(self.rounds(3))
        assert run.read_metrics() == self.rounds(1, 2, 3)

    @pytest.mark.parametrize("half", [b'{"event": "rou', b"{", b'{"event": "round", "round": 3}', b"3\n", b"\xff\n"])
    def test_a_half_written_line_is_ignored_and_dropped(self, run, half):
        run.append_metrics(self.rounds(1, 2))
        length, _ = run.metrics_state()
        with run.metrics.open("ab") as file:
            file.write(half)
        resumed = RunDirectory(run.path)
        assert resumed.read_metrics() == self.rounds(1, 2)
        resumed.truncate_metrics(length)
        resumed.append_metrics(self.rounds(3))
        assert resumed.read_metrics() == self.rounds(1, 2, 3)

    def test_a_resumed_run_drops_what_it_will_do_again(self, run):
        run.append_metrics(self.rounds(1, 2))
        length, digest = run.metrics_state()
        run.append_metrics([*self.rounds(3), {"event": "score", "client": 0}])
        resumed = RunDirectory(run.path)
        assert resumed.check_metrics(length, digest) is None
        resumed.truncate_metrics(length)
        assert resumed.read_metrics() == self.rounds(1, 2) and resumed.metrics_state() == (length, digest)

    def test_what_follows_the_length_that_a_checkpoint_vouches_for_is_not_read(self, run):
        run.append_metrics(self.rounds(1, 2))
        length, _ = run.metrics_state()
        run.append_metrics([{"evfnt": "round"}])
        assert run.read_metrics(length) == self.rounds(1, 2) and len(run.read_metrics()) == 3

    def test_the_state_is_that_of_the_file_however_it_came_about(self, run):
        run.append_metrics(self.rounds(1))
        run.append_metrics(self.rounds(2, 3))
        assert run.metrics_state() == RunDirectory(run.path).metrics_state()
        assert run.metrics_state()[0] == run.metrics.stat().st_size

    def test_the_state_is_known_without_the_file(self, run, monkeypatch):
        """Cost per round must not grow with the rounds so far."""
        run.truncate_metrics(0)
        monkeypatch.setattr("fedmoe.storage.metrics.read_bytes", lambda _: pytest.fail("the file was read"))
        run.append_metrics(self.rounds(1))
        assert run.metrics_state()[0] == run.metrics.stat().st_size

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda content: b"", r"which has 0"),
            (lambda content: content[:-1], r"relies on \d+ bytes of metrics.jsonl, which has"),
            (lambda content: content.replace(b"1", b"2", 1), r"its first \d+ bytes have changed"),
        ],
    )
    def test_metrics_that_are_not_what_a_checkpoint_relied_on_are_found(self, run, damage, reason):
        run.append_metrics(self.rounds(1, 2))
        state = run.metrics_state()
        run.metrics.write_bytes(damage(run.metrics.read_bytes()))
        assert re.search(reason, RunDirectory(run.path).check_metrics(*state) or "nothing")

    def test_metrics_that_are_gone_are_found_and_a_folder_in_their_place_is_said(self, run):
        run.append_metrics(self.rounds(1, 2))
        state = run.metrics_state()
        run.metrics.unlink()
        assert "which has 0" in (run.check_metrics(*state) or "")
        run.metrics.mkdir()
        for use in (lambda: run.check_metrics(*state), lambda: run.append_metrics([]), lambda: run.truncate_metrics(0)):
            with pytest.raises(RunError, match="a folder is in its place"):
                use()

    def test_events_are_on_disk_before_a_checkpoint_relies_on_them_and_when_the_run_ends(self, tmp_path, monkeypatch):
        run, synced = RunDirectory(tmp_path), []
        with run.opened():
            run.truncate_metrics(0)
            monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
            run.append_metrics(self.rounds(1))
            run.append_metrics(self.rounds(2))
            assert run.metrics_state()[0] == run.metrics.stat().st_size
            assert synced == [run.metrics.stat().st_size]  # once for both
            run.metrics_state()
            run.append_metrics([{"event": "score"}])
        assert synced[1:] == [run.metrics.stat().st_size]

    def test_a_disk_that_is_full_leaves_no_half_line(self, run):
        run.append_metrics(self.rounds(1))
        before = run.metrics.read_bytes(), run.metrics_state()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[0]) + 10, hard))
        try:
            with pytest.raises(RunError, match=r"metrics.jsonl could not be written"):
                run.append_metrics(self.rounds(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (run.metrics.read_bytes(), run.metrics_state()) == before


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

    def test_a_forked_process_does_not_hold_the_lock_of_its_parent_that_was_killed(self, tmp_path):
        parent = subprocess.Popen(
            [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with parent:
            assert parent.stdout.readline() == b"forked\n"
            assert parent.wait(20) == -signal.SIGKILL
            with RunDirectory(tmp_path).opened():  # while the child lives
                pass

    def test_a_link_in_the_place_of_the_lock_is_not_followed(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").symlink_to(victim)
        with pytest.raises(RunError, match="symbolic link"), RunDirectory(tmp_path / "run").opened():
            pass
        assert victim.read_text() == "precious"

    def test_the_lock_is_not_truncated(self, tmp_path):
        (tmp_path / ".lock").write_text("whatever")
        with RunDirectory(tmp_path).opened():
            assert (tmp_path / ".lock").read_text() == "whatever"
        assert mode(tmp_path / ".lock") == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_everything_is_for_the_owner_only(tmp_path, umask):
    before = os.umask(umask)
    try:
        run = RunDirectory(tmp_path / "runs" / "one")
        with run.opened():
            run.record_config(CONFIG)
            run.append_metrics([{"event": "round"}])
            run.write_json(run.results, {})
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path): mode(path) for path in (tmp_path / "runs").rglob("*")}
    assert len(found) == 7 and mode(tmp_path / "runs") == 0o700
    assert all(bits == (0o700 if (tmp_path / path).is_dir() else 0o600) for path, bits in found.items()), found


def test_folders_of_an_earlier_version_are_closed_to_others(tmp_path):
    for name in ("checkpoints", "clients"):
        (tmp_path / name).mkdir(mode=0o755)
    with RunDirectory(tmp_path).opened():
        assert mode(tmp_path / "checkpoints") == mode(tmp_path / "clients") == 0o700


@pytest.mark.parametrize("name", ["run", "run/checkpoints", "run/clients"])
def test_a_file_cannot_be_a_run_directory(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=f"cannot be a run directory.*{name}"), RunDirectory(tmp_path / "run").opened():
        pass


def test_a_folder_in_the_place_of_the_lock_is_said(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RunError, match="a folder is in its place"), RunDirectory(tmp_path).opened():
        pass


def test_few_descriptors_are_said(tmp_path):
    """All that the process may open are open already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(tmp_path, os.O_RDONLY)
    run = RunDirectory(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    os.close(lowest)
    try:
        for use in (run.read_metrics, lambda: run.write_json(run.results, {}), run.opened().__enter__):
            with pytest.raises(RunError, match=r"too many files are open.*ulimit -n"):
                use()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
