import json
import os

import pytest

from fedmoe.errors import RunError
from fedmoe.report import page
from fedmoe.report.markdown import markdown_table
from fedmoe.report.notes import notes
from fedmoe.report.runs import StoredRun
from fedmoe.report.write import read_drawable, write_report

ADAM = {"name": "adam", "learning_rate": 0.001}


def render(results, title):
    return page.render([StoredRun(result) for result in results], title)


def stored(results):
    return [StoredRun(result) for result in results]


def with_optimizer(result, optimizer):
    return result | {"config": {**result["config"], "algorithm": {"name": "x", "server_optimizer": optimizer}}}


def test_a_report_is_a_page_and_a_table(make_results, tmp_path):
    page = write_report(stored(make_results(seeds=2)), tmp_path / "new" / "folder", "Digits")
    assert page == tmp_path / "new/folder/report.html"
    assert {path.name for path in page.parent.iterdir()} == {"report.html", "table.md"}
    assert "Fine-tuned" in page.read_text() and "| Fine-tuned |" in (page.parent / "table.md").read_text()


def test_a_title_or_name_in_another_encoding_is_written(make_results, tmp_path):
    (result,) = make_results(("fedavg",), clients=1)
    write_report(stored([result | {"title": "ward \udcff", "client_names": {"0": "\udcff"}}]), tmp_path, "\udcff")


def test_a_new_folder_is_its_owners_alone(make_results, tmp_path):
    before = os.umask(0)
    try:
        page = write_report(stored(make_results()), tmp_path / "new" / "folder", "Digits")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (page.parent, page.parent.parent)}
    assert modes == {0o700} and page.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"class_counts": 3.0},
        {"class_counts": [[1, 2], [3]]},
        {"class_names": None},
        {"client_names": ["a"]},
        {"client_names": {"first": "a"}},
        {"model_weights": []},
        {"rejected": "../../x"},
        {"traffic": {"bytes_up": 1, "bytes_down": 1, "clients_that_sent": "x"}},
        {"curve": [{"round": "x"}]},
        {"warnings": 3},
    ],
)
def test_altered_results_are_named(make_results, tmp_path, change):
    def read(result):
        (tmp_path / "results.json").write_text(json.dumps(result))
        return read_drawable(tmp_path)

    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    (result,) = make_results(("fedavg",))
    assert read(result).results == result
    with pytest.raises(RunError, match=r"results.json is not as a run wrote it.*Run the same command again"):
        read(result | change)


def everywhere(results, words):
    assert words in notes(results)
    assert words.replace("|", r"\|") in markdown_table(results)
    assert words.replace("'", "&#39;") in render(results, "Digits")


def test_rounds_without_an_accepted_update_are_a_warning_in_every_table(make_results):
    first, second = make_results(("fedavg", "fine_tuned"), rounds=20)
    everywhere(
        [first | {"abandoned_rounds": 12, "rejected": 60}, second | {"abandoned_rounds": 0}],
        "Warning: FedAvg, seed 0: 12 of 20 rounds had no accepted update, so the model did not change in them.",
    )
    several = first | {"abandoned_rounds": 1, "config": {"schedule": {"min_clients": 3}}}
    assert "1 of 20 rounds had fewer than 3 accepted updates" in notes([several])[0]


def test_rejected_updates_are_counted_under_either_name(make_results):
    (result,) = make_results(("fedavg",))
    older = result | {"traffic": {**result["traffic"], "refused": 77}}
    del older["traffic"]["rejected"]
    assert "<td>77</td>" in render([older], "Digits")
    assert "<td>78</td>" in render([result | {"rejected": 78}], "Digits")


def test_runs_without_scores_are_shown_and_said(make_results):
    first, second = make_results(("fedavg", "fine_tuned"))
    results = [first | {"scores": []}, second]
    everywhere(results, "No client was asked for scores and agreed to send them: FedAvg.")
    assert "| FedAvg | – | – | – | – |" in markdown_table(results)
    assert "No client was asked" in render([first | {"scores": []}], "Digits")


def test_different_server_optimizers_are_said_below_the_table(make_results):
    averaging, adaptive, local = make_results(("fedavg", "fine_tuned", "local_only"))
    results = [with_optimizer(averaging, None), with_optimizer(adaptive, ADAM), local]
    everywhere(
        results,
        "Server optimizers differ: FedAvg averages, Fine-tuned adam (learning rate 0.001). "
        "schedule.server_optimizer sets one for all.",
    )
    assert notes([with_optimizer(averaging, ADAM), with_optimizer(adaptive, ADAM), local]) == []


def test_clients_are_shown_by_name_where_they_have_one(make_results):
    (result,) = make_results(("fedavg",), clients=3)
    accuracies = {0: 0.9, 1: 0.25, 2: 0.5}
    scores = [s | ({"accuracy": accuracies[s["client"]]} if s["data"] == "own" else {}) for s in result["scores"]]
    named = result | {"scores": scores, "client_names": {"0": "north", "1": "coast", "2": "<i>"}}
    assert notes([named]) == ["Lowest on own data, FedAvg: coast 25.0, <i> 50.0, north 90.0."]
    page = render([named], "Digits")
    assert "Lowest on own data, FedAvg: coast 25.0, &lt;i&gt; 50.0, north 90.0." in page and "<i>" not in page
    assert notes([named | {"client_names": None}]) == []
    assert notes([named | {"client_names": {0: "north"}}]) == ["Lowest on own data, FedAvg: north 90.0."]
