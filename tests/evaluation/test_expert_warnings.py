import pytest

from fedmoe.evaluation.expert_warnings import WINDOW, expert_warnings

EVEN, STARVED, ALONE = [0.3, 0.3, 0.4], [0.5, 0.499, 0.001], [0.98, 0.01, 0.01]


def said(loads):
    """Every warning of a run, with its round."""
    rounds = range(1, len(loads) + 1)
    return [(round_, words) for round_ in rounds for words in expert_warnings(loads[:round_])]


def test_a_dead_expert_is_named_once_when_it_has_been_idle_long_enough():
    ((round_, words),) = said([EVEN] * 3 + [STARVED] * 9)
    assert round_ == 3 + WINDOW and words.startswith("expert 2 did less than 1.7% of the work in each of the last 5")


def test_it_is_named_again_when_it_dies_again():
    loads = [*[STARVED] * WINDOW, EVEN, *[STARVED] * WINDOW]
    assert [round_ for round_, _ in said(loads)] == [WINDOW, 2 * WINDOW + 1]


def test_a_collapse_is_one_warning_and_not_one_for_each_idle_expert():
    ((round_, words),) = said([ALONE] * 8)
    assert round_ == WINDOW and words.startswith("expert 0 did 98% of the work") and "collapsed" in words


@pytest.mark.parametrize("loads", [[EVEN] * 20, [STARVED, EVEN] * 10, [[1.0]] * 20, [STARVED] * (WINDOW - 1), []])
def test_work_that_is_shared_now_and_then_is_no_warning(loads):
    assert said(loads) == []
