"""Several answers of one run as rows of a table, and what clients chose among candidates."""

import pytest

from fedmoe.algorithms.label_priors import answers as label_priors
from fedmoe.evaluation.answers import TOLD, by_answer, with_headline
from fedmoe.evaluation.choices import choices
from fedmoe.evaluation.summary import summarise
from fedmoe.report.choices import choice_notes, choice_sections
from fedmoe.report.methods import group
from fedmoe.report.notes import notes


def score(client, accuracy, answer="", *, model="after", data="own", chosen=False, loss=1.0):
    row = {"client": client, "unseen": False, "model": model, "data": data, "accuracy": accuracy, "loss": loss}
    return {**row, "examples": 10, **({"answer": answer} if answer else {}), **({"chosen": True} if chosen else {})}


def run(title="Ours", scores=(), headline="", candidates=(), **more):
    answers = {"headline": headline, "candidates": list(candidates)}
    base = {"title": title, "algorithm": "a", "seed": 0, "scores": list(scores), "answers": answers, "history": []}
    return {**base, "config": {}, **more}


OURS = run(
    scores=[
        score(0, 0.9, "estimated prior"),
        score(0, 0.95, "own prior"),
        score(0, 0.9, "shared", chosen=True, loss=0.5),
        score(0, 0.7, "local", loss=0.9),
        score(1, 0.6, "estimated prior"),
        score(1, 0.5, "own prior"),
        score(1, 0.6, "shared", chosen=True, loss=0.8),
        score(1, 0.8, "local", loss=0.4),
    ],
    headline="estimated prior",
    candidates=("shared", "local"),
)
RIVAL = run("FedAvg", [score(0, 0.5, model="before"), score(0, 0.55, "own prior")])


def test_headlines_come_first_and_told_priors_apart():
    rows = summarise([OURS, RIVAL])
    assert [row["title"] for row in rows] == ["Ours", "FedAvg", "Ours, own prior", "FedAvg, own prior"]
    assert [row["own"]["mean"] for row in rows] == pytest.approx([0.75, 0.5, 0.725, 0.55])


def test_results_without_answers_are_read_as_ever():
    plain = {key: value for key, value in RIVAL.items() if key != "answers"}
    plain["scores"] = plain["scores"][:1]
    assert [one["title"] for one in by_answer([plain])] == ["FedAvg"] and with_headline(plain)["scores"] == plain[
        "scores"
    ]


def test_an_answer_as_it_is_that_is_no_headline_is_named_so():
    both = run(scores=[score(0, 0.5), score(0, 0.6, "estimated prior")], headline="estimated prior")
    assert [one["title"] for one in by_answer([both])] == ["Ours", "Ours, as it is"]


def test_figures_group_by_headline_or_by_answer():
    (method,) = group([OURS])
    assert [one["accuracy"] for one in method.runs[0]["scores"]] == [0.9, 0.6]
    assert [one.title for one in group([OURS], every_answer=True)] == ["Ours", "Ours, own prior"]


def test_choice_regret_and_worth():
    first, second = choices(OURS)
    assert (first.chosen, first.best, first.regret, first.worth) == ("shared", "shared", 0.0, pytest.approx(0.2))
    assert (second.best, second.regret, second.worth) == ("local", pytest.approx(0.2), pytest.approx(-0.2))
    assert second.loss_regret == pytest.approx(0.4)
    assert choices(RIVAL) == []


def test_who_would_be_better_off_alone_is_named():
    (note,) = choice_notes([OURS, RIVAL])
    assert "clients chose shared 2" in note and "mean regret 10.0 points" in note
    assert "worth +0.0 points" in note and "Better off alone: 1 (-20.0)." in note
    (section,) = choice_sections([OURS, RIVAL])
    assert section.title == "Ours, seed 0" and len(section.columns) == len(section.rows[0])
    assert section.rows[1] == ["1", "shared", "60.0", "local", "20.0", "-20.0"]


def test_a_note_says_which_rows_were_told_a_prior():
    told = "Rows with own or balanced prior were told which labels to expect"
    assert any(note.startswith(told) for note in notes([OURS]))
    untold = run(scores=[score(0, 0.9, "estimated prior")], headline="estimated prior")
    assert not any(note.startswith(told) for note in notes([untold]))
    assert set(TOLD) == {label_priors.OWN, label_priors.BALANCED}
