"""What the terminal says of a run that needs no work, and of a round whose updates were rejected."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedmoe.display.progress import RunProgress
from fedmoe.display.tables import prediction_table, score_table
from fedmoe.experiment import Ended, Started


def shown(*events: Any) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with RunProgress(console) as progress:
        for event in events:
            progress.show("fedavg", event)
            progress._progress.refresh()
    return console.file.getvalue()


def test_a_finished_run_is_not_resumed_but_shown() -> None:
    assert "fedavg: resuming after round 60 of 80" in shown(Started(80, 60, []))
    words = shown(Started(60, 60, [], finished=True))
    assert "fedavg: finished before, showing its results" in words and "resuming" not in words


def test_rounds_that_were_trained_by_another_algorithm_are_not_resumed() -> None:
    words = shown(Started(60, 60, [], rounds_of="fedprox"))
    assert "fedavg: its 60 rounds are those of fedprox, trained once for both" in words and "resuming" not in words


def test_a_run_that_was_stopped_after_its_rounds_does_not_resume_them() -> None:
    words = shown(Started(60, 60, []))
    assert "fedavg: its 60 rounds are done; going on with what follows them" in words and "resuming" not in words


def test_rounds_that_end_early_say_why() -> None:
    assert "rounds end after 7, since it is [good] enough" in shown(Started(9, 0, []), Ended(7, "it is [good] enough"))


def test_notes_are_text_and_no_markup() -> None:
    assert "a [bold] name" in shown(Started(3, 0, ["a [bold] name"]))


def test_a_table_of_runs_without_scores_has_dashes() -> None:
    run = {"title": "mix [q]", "algorithm": "fedavg", "seed": 0, "scores": []}
    console = Console(file=io.StringIO(), width=120)
    console.print(score_table([run], "Runs"))
    assert "mix [q]" in console.file.getvalue() and "–" in console.file.getvalue()


# Predictions


@pytest.mark.parametrize(("classes", "shown"), [(5, "p(4)"), (6, "most likely")])
def test_rows_of_many_classes_show_the_likeliest(classes, shown):
    shares = np.arange(1, classes + 1) / sum(range(1, classes + 1))
    columns = {"class": [str(classes - 1)], **{f"p({c})": [float(share)] for c, share in enumerate(shares)}}
    table = prediction_table(columns, "rows")
    assert shown in [column.header for column in table.columns]
    assert any(f"{shares[-1]:.4f}" in str(cell) for column in table.columns for cell in column.cells)
    if classes == 6:
        (cell,) = table.columns[-1].cells
        assert cell == f"5: {shares[5]:.4f}, 4: {shares[4]:.4f}, 3: {shares[3]:.4f}"
        assert table.caption == "the 3 likeliest of 6 classes; --to FILE writes all"
