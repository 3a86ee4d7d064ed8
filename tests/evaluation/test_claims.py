"""A claim is decided by pairs of runs with the same seed."""

import pytest

from fedmoe.evaluation.claims import Difference, by_seed, decide, paired_difference


def run(title, seed, accuracy, model="after", data="own", task=None):
    score = {"client": 0, "unseen": False, "model": model, "data": data, "accuracy": accuracy, "loss": 1.0}
    if task == "regression":
        score["metrics"] = {"rmse": accuracy}
    return {"title": title, "seed": seed, "algorithm": title, "task": task, "scores": [score, {**score, "client": 1}]}


def test_differences_are_paired_over_the_seeds_that_both_have():
    runs = [run("a", 0, 0.5), run("a", 1, 0.7), run("a", 2, 0.9), run("b", 0, 0.4), run("b", 1, 0.5)]
    found = paired_difference(runs, "a", "b", "own")
    assert found.seeds == 2 and found.mean == pytest.approx(0.15) and found.half > 0
    assert paired_difference(runs, "a", "nobody", "own") == Difference(0, None, None)


def test_a_lower_error_is_better():
    runs = [run("a", 0, 1.0, task="regression"), run("b", 0, 3.0, task="regression")]
    assert paired_difference(runs, "a", "b", "own").mean == 2.0


def test_before_and_after_personalisation_are_told_apart():
    both = run("a", 0, 0.5)
    both["scores"] += run("a", 0, 0.3, model="before")["scores"]
    assert by_seed([both], "a", "own") == {0: 0.5} and by_seed([both], "a", "own", "before") == {0: 0.3}


@pytest.mark.parametrize("seeds", [0, 1, 2, 3])
def test_fewer_than_four_seeds_decide_nothing(seeds):
    assert decide(Difference(seeds, 0.5 if seeds else None, 0.01 if seeds > 1 else None)) == "undecided"


def test_an_interval_around_zero_decides_nothing():
    assert decide(Difference(4, 0.01, 0.02)) == decide(Difference(4, 0.005, 0.006), margin=0.01) == "undecided"
