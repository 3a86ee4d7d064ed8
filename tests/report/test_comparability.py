from pathlib import Path

import pytest

from fedmoe.report.comparability import differences, in_order, not_comparable, title_of
from fedmoe.report.runs import StoredRun


def run(title="FedMix", seed=0, digest="same", experts=4, **config):
    return {
        "title": title,
        "seed": seed,
        "split_digest": f"{digest} of {seed}",
        "config": {"seed": seed, "name": f"{title}-{seed}", "algorithm": {"num_experts": experts}, **config},
    }


def check(*results):
    *others, last = results
    return not_comparable(last, Path("last"), others, [Path(f"run{number}") for number in range(len(others))])


def test_seeds_of_one_method_and_other_methods_on_the_same_splits_go_together():
    assert check(run(), run(seed=1), run("FedAvg", experts=None), run("FedAvg", seed=1, experts=None)) is None


def test_how_a_run_was_computed_does_not_matter():
    assert check(run(engine={"workers": 1}), run(seed=1, engine={"workers": 2})) is None


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (run(seed=1, experts=2), "it and run0 are both called 'FedMix', but differ in algorithm.num_experts"),
        (run(seed=1, schedule={"rounds": 3}), "differ in schedule"),
        (run(), "it is the same as run0, 'FedMix' with seed 0"),
        (run("FedAvg", digest="other"), "it and run0 have seed 0 but saw different splits"),
    ],
)
def test_what_cannot_be_compared_is_named(second, words):
    assert check(run(), second).startswith("last is left out: ")
    assert words in check(run(), second)


def test_differences_are_named_by_their_paths():
    one, other = {"a": {"b": 1, "c": 2}, "d": [1], "seed": 0}, {"a": {"b": 1, "c": 3}, "d": [1, 2], "seed": 1}
    assert list(differences(one, other)) == ["a.c", "d"]
    assert list(differences({"a": {"seed": 0}}, {"a": {"seed": 1}})) == ["a.seed"]


def test_methods_stand_in_the_order_of_their_comparison():
    compare = ["local_only", {"name": "fedmix", "label": "two"}, {"name": "fedmix", "label": None}]
    algorithms = [{"name": "fedmix", "label": None}, {"name": "fedmix", "label": "two"}, {"name": "local_only"}]
    runs = [
        StoredRun({"seed": seed, "name": "n", "config": {"algorithm": algorithm, "compare": compare}})
        for algorithm in algorithms
        for seed in (1, 0)
    ]
    ordered = [(one.results["seed"], one.results["config"]["algorithm"]) for one in in_order(runs)]
    assert ordered == [(seed, algorithm) for seed in (0, 1) for algorithm in reversed(algorithms)]


def test_a_page_has_the_name_of_its_config():
    named = [StoredRun({"name": name}) for name in ("digits-comparison/fedavg-seed0", "digits")]
    assert title_of(named) == "digits"
    assert title_of(named[:1]) == "digits-comparison/fedavg-seed0"
    assert title_of([*named, StoredRun({"name": "other"})]) == "Runs"
