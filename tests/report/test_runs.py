"""Broken run directories are named, whatever is wrong with them, and the others are still reported."""

import json

import pytest

from fedmoe.errors import RunError
from fedmoe.report.comparability import read_together
from fedmoe.report.runs import MOST_MAPS, find_runs, read_run


def store(folder, result, metrics=""):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "results.json").write_text(json.dumps(result))
    (folder / "manifest.json").write_text(json.dumps({"sent_by_clients": {}}))
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


def test_maps_of_experts_are_read_from_the_metrics_evenly_chosen(make_results, tmp_path):
    def event(number):
        experts = {"load": [1.0], "assignment": {"of": "label", "shares": [[1.0]]} if number % 2 else None}
        return json.dumps({"event": "round", "round": number, "experts": experts}) + "\n"

    folder = store(tmp_path / "run", make_results(("fedavg",))[0], "".join(map(event, range(1, 201))))
    maps = read_run(folder).expert_maps
    assert len(maps) == MOST_MAPS and (maps[0]["round"], maps[-1]["round"]) == (1, 199)
    assert maps[0]["shares"] == [[1.0]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("results.json", None, "holds no finished run"),
        ("results.json", "{", "it is no JSON"),
        ("results.json", "{}", "lacks 'name'"),
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", "{half", "is not as a run wrote it"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", '{"experts": {"assignment": {', "is not as a run wrote it"),
    ],
)
def test_a_broken_folder_is_named_and_the_others_are_reported(make_results, tmp_path, name, content, words):
    first, second = make_results(("fedavg", "fine_tuned"))
    whole, broken = store(tmp_path / "whole", first), store(tmp_path / "broken", second)
    (broken / name).unlink()
    if content is not None:
        (broken / name).write_text(content)
    with pytest.raises(RunError, match="broken"):
        read_run(broken)
    found = read_together([broken, whole])
    assert [run.results["title"] for run in found.runs] == ["FedAvg"]
    assert len(found.problems) == 1 and "broken" in found.problems[0] and words in found.problems[0]


def test_runs_right_below_a_folder_are_found(make_results, tmp_path):
    store(tmp_path / "all" / "b", make_results(("fedavg",))[0])
    store(tmp_path / "all" / "a", make_results(("fedavg",))[0])
    assert find_runs(tmp_path / "all") == [tmp_path / "all/a", tmp_path / "all/b"]
    assert find_runs(tmp_path / "all/a") == [tmp_path / "all/a"] and find_runs(tmp_path / "none") == []
