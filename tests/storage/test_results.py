import json

import pytest

from fedmoe.errors import RunError
from fedmoe.storage.results import read_results

SCORE = {"client": 0, "unseen": False, "model": "before", "data": "own", "accuracy": 0.5, "loss": 1.0, "examples": 9}
RESULTS = {
    "name": "demo",
    "algorithm": "fedavg",
    "title": "FedAvg",
    "seed": 3,
    "config": {"seed": 3},
    "versions": {"torch": "2.13"},
    "scores": [SCORE, {**SCORE, "client": 1, "accuracy": 1}],
    "history": [{"round": 1, "reports": {}}],
    "traffic": {"bytes_up": 10, "bytes_down": 20},
    "rounds": 1,
    "seconds": 0.5,
}


def write(folder, results):
    (folder / "results.json").write_text(json.dumps(results))


def test_a_finished_run_is_read(tmp_path):
    write(tmp_path, RESULTS)
    assert read_results(tmp_path) == RESULTS


def test_an_unfinished_run_and_a_folder_that_is_no_run_are_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=f"{folder} holds no finished run"):
            read_results(folder)


@pytest.mark.parametrize("content", [b'{"seed": ', b"\xff", b"", b"[" * 100_000])
def test_what_is_no_json_is_said(tmp_path, content):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(RunError, match=r"results.json is not as a run wrote it: it is no JSON"):
        read_results(tmp_path)


def test_a_folder_in_its_place_and_a_file_in_the_place_of_the_folder_are_said(tmp_path):
    (tmp_path / "results.json").mkdir()
    with pytest.raises(RunError, match=r"results.json could not be read: a folder is in its place"):
        read_results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"results.json could not be read: a file is where a folder should be"):
        read_results(tmp_path / "file")


@pytest.mark.parametrize("key", RESULTS)
def test_a_key_that_is_missing_or_of_another_kind_is_named(tmp_path, key):
    write(tmp_path, {name: value for name, value in RESULTS.items() if name != key})
    with pytest.raises(RunError, match=f"it lacks '{key}'"):
        read_results(tmp_path)
    write(tmp_path, RESULTS | {key: True})
    with pytest.raises(RunError, match=f"it has '{key}': True"):
        read_results(tmp_path)


@pytest.mark.parametrize("value", [None, 3, "results", [], [RESULTS]])
def test_what_is_no_object_is_said(tmp_path, value):
    write(tmp_path, value)
    with pytest.raises(RunError, match=r"where an object should be"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [SCORE, 3]}, r"scores\[1\] is 3, where an object should be"),
        ({"scores": [{k: v for k, v in SCORE.items() if k != "data"}]}, r"scores\[0\] lacks 'data'"),
        ({"scores": [SCORE | {"accuracy": "high"}]}, r"scores\[0\] has 'accuracy': 'high'"),
        ({"scores": [SCORE | {"unseen": 1}]}, r"scores\[0\] has 'unseen': 1"),
        ({"history": [{"round": 1}]}, r"history\[0\] lacks 'reports'"),
        ({"traffic": {"bytes_up": 1}}, r"traffic lacks 'bytes_down'"),
    ],
)
def test_what_a_page_needs_of_the_parts_is_named_too(tmp_path, change, message):
    write(tmp_path, RESULTS | change)
    with pytest.raises(RunError, match=message):
        read_results(tmp_path)
