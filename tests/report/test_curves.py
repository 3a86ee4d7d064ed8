"""Learning curves, drawn."""

import re

from fedmoe.report.curves import curve_of, learning_curve
from fedmoe.report.html import render
from fedmoe.report.methods import group


def point(number, own, pooled=None):
    return {
        "round": number,
        "bytes_up": 10**9 * number,
        "bytes_down": 2 * 10**9 * number,
        "own": own,
        "global": own,
        "unseen": None,
        "pooled": pooled,
    }


def with_curves(make_results):
    first, second = make_results(("fedavg",), seeds=2)
    return [
        {**first, "curve": [point(10, 0.4, 0.3), point(20, 0.6, 0.5)]},
        {**second, "curve": [point(10, 0.6, 0.5), point(15, 0.9, 0.9), point(20, 0.8, 0.7)]},
    ]


def test_a_curve_is_the_mean_over_seeds_where_all_of_them_looked(make_results):
    method = group(with_curves(make_results))[0]
    assert curve_of(method, "own", "round") == [(10, 0.5), (20, 0.7)]
    assert curve_of(method, "pooled", "bytes") == [(30.0, 0.4), (60.0, 0.6)]
    assert curve_of(method, "unseen", "round") == []


def test_the_figure_holds_a_line_per_method_from_zero_and_says_where_it_ends(make_results):
    figure = learning_curve(with_curves(make_results), "own", "bytes")
    ((start, _), (end, _)) = [pair.split(",") for pair in re.search(r'points="([^"]*)"', figure)[1].split()]
    assert float(end) == 624 and float(start) == 68 + (624 - 68) / 2
    assert "FedAvg: 70.0% in the end" in figure


def test_the_page_shows_the_curves_that_there_are(make_results):
    page = render(with_curves(make_results), "Curves")
    assert page.count('id="curve-own-round-title"') == page.count('id="curve-pooled-bytes-title"') == 1
    assert "curve-unseen" not in page
    assert "Learning curves" not in render(make_results(("fedavg",)), "None")
