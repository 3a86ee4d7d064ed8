import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sklearn import metrics as sk

import fedmoe
from builders import make_expert, make_gate, tiny_federation
from fedmoe.display.tables import class_tables, metric_tables, score_table
from fedmoe.errors import ConfigError
from fedmoe.evaluation import classification as ours
from fedmoe.evaluation.metric_catalog import METRICS as EVERY_METRIC
from fedmoe.evaluation.metrics import load_metrics
from fedmoe.report.markdown import markdown_table
from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun

METRICS = [name for name, spec in EVERY_METRIC.items() if spec.task == "classification"]


def drawn(seed, size, classes, present=None):
    stream = torch.Generator().manual_seed(seed)
    scores = (2 * torch.randn(size, classes, generator=stream)).round(decimals=1)  # rounded: some tie
    labels = torch.randint(present or classes, (size,), generator=stream)
    return scores.double().log_softmax(1), labels


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 60), classes=st.integers(2, 6))
def test_they_agree_with_scikit_learn_where_it_defines_them(seed, size, classes):
    log_probs, y = drawn(seed, size, classes)
    probs, labels, predicted = log_probs.exp().numpy(), y.numpy(), log_probs.argmax(1).numpy()
    everything = np.arange(classes)
    assert ours.log_loss(log_probs, y) == pytest.approx(sk.log_loss(labels, probs, labels=everything))
    recalls = sk.recall_score(labels, predicted, labels=everything, average=None, zero_division=np.nan)
    assert [ours.recall(log_probs, y, label) for label in range(classes)] == pytest.approx(recalls, nan_ok=True)
    assert ours.balanced_accuracy(log_probs, y) == pytest.approx(np.nanmean(recalls))
    assert ours.macro_f1(log_probs, y) == pytest.approx(sk.f1_score(labels, predicted, average="macro"))
    assert ours.brier(log_probs, y) == pytest.approx(((probs - np.eye(classes)[labels]) ** 2).sum(1).mean())
    there = [label for label in range(classes) if 0 < (labels == label).sum() < size]
    areas = [sk.roc_auc_score(labels == label, log_probs[:, label].numpy()) for label in there]
    assert ours.auc(log_probs, y) == pytest.approx(np.mean(areas) if areas else math.nan, nan_ok=True)


def test_with_two_classes_the_area_is_that_of_the_second():
    log_probs, y = drawn(3, 50, 2)
    assert ours.auc(log_probs, y) == pytest.approx(sk.roc_auc_score(y.numpy(), log_probs[:, 1].exp().numpy()))


def test_calibration_error_by_hand_over_fifteen_bins():
    confidence = torch.tensor([0.95, 0.97, 0.55, 0.6, 1.0], dtype=torch.float64)
    log_probs = torch.stack([confidence, 1 - confidence], 1).log()
    y = torch.tensor([0, 1, 0, 1, 0])  # bins (14/15, 1]: 0.95 right, 0.97 wrong, 1.0 right; (8/15, 9/15]: right, wrong
    by_hand = (abs(2 - (0.95 + 0.97 + 1.0)) + abs(1 - (0.55 + 0.6))) / 5
    assert ours.ece(log_probs, y) == pytest.approx(by_hand)


def test_a_perfectly_calibrated_coin_has_no_calibration_error():
    log_probs = torch.full((10, 2), 0.5).log()
    assert ours.ece(log_probs, torch.tensor([0, 1] * 5)) == pytest.approx(0, abs=1e-7)


def test_what_is_undefined_is_nan():
    log_probs, _ = drawn(0, 8, 3)
    one_class = torch.zeros(8, dtype=torch.int64)
    assert math.isnan(ours.auc(log_probs, one_class)) and math.isnan(ours.recall(log_probs, one_class, 1))
    diverged = torch.full((8, 3), math.nan)
    for function in (ours.auc, ours.ece, ours.brier, ours.log_loss):
        assert math.isnan(function(diverged, torch.arange(8) % 3))


def test_every_name_of_the_catalog_loads_and_is_a_number():
    log_probs, y = drawn(1, 20, 3)
    loaded = load_metrics(METRICS, 3)
    assert list(loaded)[-3:] == ["recall_0", "recall_1", "recall_2"]
    assert all(math.isfinite(metric(log_probs, y)) for metric in loaded.values())


def test_a_metric_of_another_task_is_refused():
    with pytest.raises(ConfigError, match="'auc' is for classification, and these data are a regression"):
        load_metrics(["auc"], 0, "regression")


def test_they_are_sent_stored_and_shown_with_the_names_of_classes(tmp_path):
    config = {
        "algorithm": {"name": "fine_tuned"},
        "schedule": {"rounds": 1, "clients_per_round": 3},
        "training": {"personal": {"epochs": 2}},
        "evaluation": {"metrics": METRICS},
        "engine": {"workers": 1, "backend": "sequential"},
    }
    result = fedmoe.run(config, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path)
    (score,) = [s for s in result.scores if (s.client, s.model, s.data) == (2, "after", "own")]
    assert score.metrics["log_loss"] == pytest.approx(score.loss)
    test = tiny_federation().load(2).test
    log_probs = result.personal_model(2)(test.x).log()
    assert score.metrics["brier"] == pytest.approx(ours.brier(log_probs, test.y), abs=1e-5)
    run = {**result.data, "class_names": ["left", "right|wrong", "<up>"]}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(score_table([run], "run"), *metric_tables([run]), *class_tables([run]))
    assert all(words in console.export_text(clear=False) for words in ("own data", "worst 10%", "Macro-F1", "Brier"))
    for text, bar in ((console.export_text(), "right|wrong"), (markdown_table([run]), r"right\|wrong")):
        assert "Macro-F1" in text and "by class" in text and bar in text and "recall_0" not in text
    page = render([StoredRun(run)], "run")
    assert "Recall by class" in page and "&lt;up&gt;" in page and "Balanced accuracy" in page
