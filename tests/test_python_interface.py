"""From Python: what is shown of a run, how it is followed, and comparisons. Nothing shows rows or weights."""

import io
import json
import math
import re

import pytest
import torch
from torch import nn

import fedmoe
from builders import make_expert, make_gate, tiny_federation
from fedmoe.engines.steps import RoundRecord
from fedmoe.experiment import Advanced, Started
from fedmoe.result import Result

CONFIG = {
    "algorithm": {"name": "fine_tuned"},
    "schedule": {"rounds": 2, "clients_per_round": 3},
    "training": {"personal": {"epochs": 2}, "local": {"epochs": 2}},
    "engine": {"workers": 1, "backend": "sequential"},
    "evaluation": {"metrics": ["macro_f1", "recall"]},
}


def run(folder, **options):
    return fedmoe.run(
        CONFIG, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=folder, **options
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"))


NUMBERS = re.compile(r"-?\d+\.\d{3,}")


class TestRepr:
    def test_it_fits_a_screen_and_shows_no_rows_or_weights(self, result):
        parts = fedmoe.build(CONFIG, federation=tiny_federation(), expert=make_expert, gate=make_gate)
        federation, records = result.federation, result.federation.load(0)
        data = federation.data([0, 1], opted_in_only=True)
        things = [result, federation, parts, result.session, records, records.train, data, result.personal_model(0)]
        data.train  # noqa: B018 (a part that was made is shown too)
        drawn = fedmoe.build({"algorithm": {"name": "fedavg"}}).source
        for thing in [*things, data, parts.expert, drawn, drawn.split]:
            text = repr(thing)
            assert len(text.splitlines()) <= 24 and len(text) < 2000, type(thing)
            assert "tensor(" not in text and "array(" not in text and not NUMBERS.search(text), text

    def test_they_say_what_is_there(self, result):
        assert "Fine-tuned" in repr(result) and str(result.directory) in repr(result)
        assert re.search(r"<Federation: \d+ clients, \d+ of them opted in", repr(result.federation))
        assert "train not made yet" in repr(result.federation.data([0], opted_in_only=True))
        assert repr(tiny_federation().load(0)).startswith("<Records: rows train")

    def test_the_data_sets_too(self):
        table = fedmoe.Table(torch.rand(50, 3), torch.arange(50) % 2)
        dataset = fedmoe.Dataset("mine", table, table, ("a", "b"))
        assert repr(dataset) == "<Dataset mine: 50 training and 50 test rows; 2 classes>"
        assert repr(table) == "<Table: x (50, 3) torch.float32; label>"


class TestSummary:
    def test_it_has_the_means_and_every_client(self, result):
        text = result.summary()
        after = [s for s in result.scores if s.data == "own" and s.model == "after" and not s.unseen]
        assert f"→{100 * sum(s.accuracy for s in after) / len(after):.1f}" in text
        assert "Macro-F1" in text and "recall by class" in text and str(result.directory) in text
        for score in after:
            assert re.search(rf"^{score.client} .*{score.examples} .*{100 * score.accuracy:.1f}", text, re.MULTILINE)
        assert max(map(len, text.splitlines())) < 140

    def test_columns_are_named_after_classes(self, result):
        rows = result.by_client()
        classes = result.data["class_names"]
        assert set(rows[0]) == {"client", "unseen", "examples", "accuracy", "loss", "macro_f1"} | {
            f"recall {name}" for name in classes
        }
        own = {s.client: s for s in result.scores if s.data == "own" and s.model == "after"}
        assert [row["accuracy"] for row in rows] == [own[int(row["client"])].accuracy for row in rows]

    def test_of_many_clients_the_worst_are_shown(self, result):
        from fedmoe.report.text import clients_text

        (score,) = [s for s in result.data["scores"] if (s["client"], s["data"], s["model"]) == (0, "own", "after")]
        many = [{**score, "client": n, "accuracy": n / 100, "metrics": {"macro_f1": math.nan}} for n in range(50)]
        text = clients_text({**result.data, "scores": many})
        assert len(text.splitlines()) == 22 and text.endswith("The 20 with the lowest accuracy of 50.")
        assert "–" in text and "nan" not in text

    def test_of_many_classes_a_line_has_none(self, result):
        from fedmoe.report.text import clients_text

        metrics = {"macro_f1": 0.5, **{f"recall_{label}": 0.25 for label in range(30)}}
        scores = [{**score, "metrics": metrics} for score in result.data["scores"]]
        head = clients_text(
            {**result.data, "scores": scores, "class_names": [f"c{n}" for n in range(30)]}
        ).splitlines()[0]
        assert head.split() == ["client", "rows", "accuracy", "loss", "macro_f1"]

    def test_a_run_that_asked_nobody_says_so(self, result):
        text = Result({**result.data, "scores": []}, result.directory, result.session).summary()
        assert "No client was asked" in text

    def test_a_notebook_gets_a_table(self, result):
        page = result._repr_html_()
        assert page.startswith("<div>") and "<table>" in page and "Macro-F1" in page and "<script" not in page


class TestFollowing:
    def test_a_callback_gets_every_event(self, tmp_path):
        events = []
        result = run(tmp_path, callback=events.append)
        kinds = [type(event) for event in events]
        assert kinds[0] is Started and kinds[-1] is Result and events[-1] is result
        assert [event.round for event in events if isinstance(event, RoundRecord)] == [1, 2]
        assert {event.stage for event in events if isinstance(event, Advanced)} == {"personalise", "score"}

    def test_what_it_raises_ends_the_run_which_can_be_resumed(self, tmp_path):
        def stop(event):
            if isinstance(event, RoundRecord):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, callback=stop)
        events = []
        resumed = run(tmp_path, callback=events.append)
        assert events[0].resumed_from == 1 and len(resumed.data["history"]) == 2

    def test_progress_is_shown_where_it_is_asked_for(self, tmp_path, capsys):
        run(tmp_path / "quiet")
        assert capsys.readouterr().out == ""
        run(tmp_path / "shown", progress=True)
        assert "fine_tuned" in capsys.readouterr().out


class TestCompare:
    def test_it_gives_the_table_of_the_command_line(self, tmp_path):
        labels = []
        compared = fedmoe.compare(
            CONFIG,
            algorithms=["fedavg", {"name": "fine_tuned", "label": "tuned"}],
            seeds=[0, 1],
            federation=tiny_federation(),
            expert=make_expert,
            gate=make_gate,
            directory=tmp_path,
            callback=lambda label, event: labels.append((label, type(event))),
        )
        assert [row["title"] for row in compared.rows] == ["FedAvg", "tuned"]
        assert all(row["seeds"] == 2 and row["own"]["interval"] is not None for row in compared.rows)
        assert [label for label, kind in labels if kind is Result] == list(compared.runs)
        assert "tuned" in compared.summary() and "±" in compared.summary() and "<table>" in compared._repr_html_()
        assert repr(compared) == f"<Comparison of FedAvg, tuned; seeds [0, 1]; in {tmp_path}>"
        assert (tmp_path / "report.html").exists()
        stored = [json.loads((folder / "results.json").read_text()) for folder in compared.runs.values()]
        assert [run["scores"] for run in stored] == [run["scores"] for run in compared.results]
        loaded = fedmoe.load(compared.runs["tuned-seed1"], expert=make_expert, gate=make_gate)
        assert loaded.summary() == Result(stored[3], loaded.directory, loaded.session).summary()

    def test_nothing_to_compare_is_said(self):
        with pytest.raises(fedmoe.ConfigError, match="algorithms= is empty"):
            fedmoe.compare(CONFIG, algorithms=[], federation=tiny_federation(), expert=make_expert, gate=make_gate)

    def test_the_seed_and_the_algorithms_of_the_config_are_the_default(self, tmp_path):
        compared = fedmoe.compare(
            {**CONFIG, "seed": 7, "compare": ["fedavg"]},
            federation=tiny_federation(),
            expert=make_expert,
            gate=make_gate,
            directory=tmp_path,
        )
        assert [run["seed"] for run in compared.results] == [7]


def test_names_of_classes_reach_every_table(tmp_path):
    from rich.console import Console

    from fedmoe.display.tables import class_tables

    rows = [{"ward": "ab"[n % 2], "age": n % 7, "ill": "flu" if n % 7 > 3 else "cold"} for n in range(60)]
    federation = fedmoe.federation_from_table(rows, client="ward", label="ill")
    config = {**CONFIG, "schedule": {"rounds": 1, "clients_per_round": "all"}}
    result = fedmoe.run(
        config, federation=federation, expert=lambda: nn.Linear(1, 2), gate=lambda: nn.Linear(1, 1), directory=tmp_path
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*class_tables([result.data]))
    report = (tmp_path / "report.html").read_text()
    for text in (console.export_text(), result.summary(), report, (tmp_path / "table.md").read_text()):
        assert "flu" in text and "cold" in text
    assert "recall flu" in result.by_client()[0] and "(cold, flu)" in repr(federation)
