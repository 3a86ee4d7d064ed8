import pytest

from fedmoe.errors import RunError
from fedmoe.storage.finished import MARK, changed_since_finished, mark_finished
from fedmoe.storage.rundir import RunDirectory

RUN = "a" * 32


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path)
    with directory.opened():
        directory.append_metrics([{"event": "score"}])
        directory.write_json(directory.manifest, {})
        directory.write_json(directory.results, {"scores": []})
        directory.write_json(directory.federation, {"num_clients": 3})
        yield directory


def test_a_run_is_finished_once_it_is_marked(run):
    assert changed_since_finished(run, RUN) is None
    mark_finished(run, RUN)
    assert changed_since_finished(run, RUN) == []


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "metrics.jsonl", "federation.json"])
def test_a_file_that_was_altered_or_deleted_is_named(run, name):
    mark_finished(run, RUN)
    path = run.path / name
    path.write_bytes(path.read_bytes() + b" ")
    assert changed_since_finished(run, RUN) == [name]
    path.unlink()
    assert changed_since_finished(run, RUN) == [name]


@pytest.mark.parametrize("content", [b"", b"3", b'{"run_id": 3}', b"\xff", b"[" * 100_000])
def test_a_damaged_mark_is_named(run, content):
    (run.path / MARK).write_bytes(content)
    assert changed_since_finished(run, RUN) == [MARK]


def test_the_mark_of_another_run_is_none_of_this(run):
    mark_finished(run, "b" * 32)
    assert changed_since_finished(run, RUN) == [MARK]


def test_a_folder_in_the_place_of_the_mark_is_said(run):
    (run.path / MARK).mkdir()
    with pytest.raises(RunError, match=r"finished.json could not be read: a folder is in its place"):
        changed_since_finished(run, RUN)
