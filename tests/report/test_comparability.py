from pathlib import Path

import pytest

from fedmoe.errors import ConfigError
from fedmoe.report.comparability import check_together, differences


def run(title="FedMix", seed=0, digest="same", experts=4, **config):
    return {
        "title": title,
        "seed": seed,
        "split_digest": f"{digest} of {seed}",
        "config": {"seed": seed, "name": f"{title}-{seed}", "algorithm": {"num_experts": experts}, **config},
    }


def check(*results):
    check_together(results, [Path(f"run{number}") for number in range(len(results))])


def test_seeds_of_one_method_and_other_methods_on_the_same_splits_go_together():
    check(run(), run(seed=1), run("FedAvg", experts=None), run("FedAvg", seed=1, experts=None))


def test_how_a_run_was_computed_does_not_matter():
    check(run(engine={"workers": 1}), run(seed=1, engine={"workers": 2}))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (run(seed=1, experts=2), "run0 and run1 are both called 'FedMix', but differ in algorithm.num_experts"),
        (run(seed=1, schedule={"rounds": 3}), "differ in schedule"),
        (run(), "run0 and run1 are the same: 'FedMix' with seed 0"),
        (run("FedAvg", digest="other"), "run0 and run1 have seed 0 but saw different splits"),
    ],
)
def test_what_cannot_be_compared_is_refused(second, words):
    with pytest.raises(ConfigError, match=words):
        check(run(), second)


def test_differences_are_named_by_their_paths():
    one, other = {"a": {"b": 1, "c": 2}, "d": [1], "seed": 0}, {"a": {"b": 1, "c": 3}, "d": [1, 2], "seed": 1}
    assert list(differences(one, other)) == ["a.c", "d"]
    assert list(differences({"a": {"seed": 0}}, {"a": {"seed": 1}})) == ["a.seed"]
