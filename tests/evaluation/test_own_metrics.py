"""Metrics of the user's own: measured by clients, sent as declared numbers, stored and shown."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fedmoe
from builders import make_expert, make_gate, read_private, tiny_federation
from fedmoe.config import parse_config
from fedmoe.display.tables import score_table
from fedmoe.errors import ConfigError, MessageError
from fedmoe.evaluation.metrics import Score, load_metrics, score_examples
from fedmoe.evaluation.score_message import score_message, scores_in
from fedmoe.evaluation.summary import summarise
from fedmoe.report.markdown import markdown_table
from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun

MODULE = """
import torch


def brier(log_probs, y):
    return ((log_probs.exp() - torch.nn.functional.one_hot(y, log_probs.shape[1])) ** 2).sum(1).mean()


def share_of_class_two(log_probs, y):
    return float("nan") if not (y == 2).any() else (y == 2).float().mean()


def words(log_probs, y):
    return "good"


class other:
    brier = staticmethod(brier)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_metrics.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "somebodys_metrics", raising=False)


def run(folder: Path, *metrics: str, algorithm: str = "fine_tuned", **evaluation: Any) -> fedmoe.Result:
    table = {
        "algorithm": {"name": algorithm},
        "schedule": {"rounds": 2, "clients_per_round": 3},
        "training": {"personal": {"epochs": 2}},
        "evaluation": {"metrics": [f"somebodys_metrics:{name}" for name in metrics], **evaluation},
        "engine": {"workers": 1, "backend": "sequential"},
    }
    return fedmoe.run(table, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=folder)


def test_they_are_what_the_function_says_of_the_clients_own_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "brier")
    test = tiny_federation().load(3).test
    log_probs = result.personal_model(3)(test.x).log()
    (score,) = [s for s in result.scores if (s.client, s.model, s.data) == (3, "after", "own")]
    from somebodys_metrics import brier  # type: ignore[import-not-found]

    assert score.metrics["brier"] == pytest.approx(float(brier(log_probs, test.y)), abs=1e-6)
    assert all(set(score.metrics) == {"brier"} for score in result.scores)


def test_they_are_stored_sent_and_shown(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "brier", "share_of_class_two")
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert all(set(score["metrics"]) == {"brier", "share_of_class_two"} for score in stored["scores"])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert "metrics/brier" in json.dumps(manifest)
    own = [s.metrics["brier"] for s in result.scores if s.model == "after" and s.data == "own" and not s.unseen]
    (row,) = summarise([stored])
    assert row["metrics"]["brier"]["mean"] == pytest.approx(sum(own) / len(own))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(score_table([stored], "run"))
    for text in (console.export_text(), markdown_table([stored]), render([StoredRun(stored)], "run")):
        assert "brier" in text.lower() and f"{row['metrics']['brier']['mean']:.3g}" in text


def test_a_run_without_them_is_stored_and_shown_as_before(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    assert all("metrics" not in score for score in result.data["scores"])
    assert "metric" not in json.dumps(json.loads((tmp_path / "run" / "manifest.json").read_text()))


def test_where_one_is_not_defined_it_is_left_out_of_means() -> None:
    scores = [
        Score(client, False, "before", "own", 0.5, 1.0, 10, {"auc": value}).as_dict()
        for client, value in enumerate((0.2, math.nan, 0.4))
    ]
    (row,) = summarise([{"title": "a", "algorithm": "a", "scores": scores}])
    assert row["metrics"]["auc"]["mean"] == pytest.approx(0.3)
    (row,) = summarise([{"title": "a", "algorithm": "a", "scores": scores[1:2]}])
    assert row["metrics"]["auc"] is None


def test_clients_that_are_not_asked_keep_them(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "brier", clients_asked="none")
    assert result.scores == []
    kept = [
        row for (kind, _, _), row in read_private(tmp_path / "run/clients/private.sqlite").items() if kind == "scores"
    ]
    assert kept and all(b"metrics/brier" in row for row in kept)


HONEST = score_message([Score(1, False, "before", data, 0.5, 1.0, 10, {"auc": 0.7}) for data in ("own", "global")])


def test_honest_ones_are_read() -> None:
    assert [score.metrics for score in scores_in(HONEST, 1, unseen=False, metrics=["auc"])] == [{"auc": 0.7}] * 2


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({}, r"it has metrics \[\], not \['auc'\]"),
        ({"auc": HONEST.metrics["auc"], "more": HONEST.metrics["auc"]}, r"\['auc', 'more'\]"),
        ({"auc": HONEST.metrics["auc"][:1]}, "metrics/auc is .* not a column"),
        ({"auc": HONEST.metrics["auc"].float()}, "metrics/auc is torch.float32"),
        ({"auc": torch.tensor([math.inf, 0.5], dtype=torch.float64)}, "'auc' is beyond"),
        ({"auc": torch.tensor([-1e10, 0.5], dtype=torch.float64)}, "'auc' is beyond"),
    ],
)
def test_others_than_the_config_names_or_out_of_range_are_rejected(metrics: Any, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        scores_in(HONEST._replace(metrics=metrics), 1, unseen=False, metrics=["auc"])


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["cost"], r"evaluation\.metrics='cost' is not known, and no import string"),
        (["macro_f"], r"Did you mean 'macro_f1'"),
        (["accuracy"], "always measured"),
        (["somebodys_metrics:brier", "somebodys_metrics:other.brier"], None),
    ],
)
def test_names_in_a_config(names: list[str], sentence: str | None) -> None:
    if sentence is None:
        assert load_metrics(parse_config({"evaluation": {"metrics": names}}).evaluation.metrics, 3).keys() == {
            "brier",
            "other.brier",
        }
        return
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"evaluation": {"metrics": names}})


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no 'breir'\. Did you mean 'brier'"):
        run(tmp_path / "run", "breir")
    assert not (tmp_path / "run" / "config.toml").exists()
    with pytest.raises(ConfigError, match="two metrics called 'brier'"):
        load_metrics(["somebodys_metrics:brier", "somebodys_metrics:brier"], 3)
    with pytest.raises(ConfigError, match="'words' returned a str, not a number"):
        score_examples(lambda x: x, tiny_federation().load(3).test, load_metrics(["somebodys_metrics:words"], 3))
