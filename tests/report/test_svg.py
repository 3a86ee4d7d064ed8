import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmoe.report import svg

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(low=numbers, width=st.floats(1e-3, 1e6))
def test_ticks_are_few_evenly_spaced_and_inside(low, width):
    at = svg.ticks(low, low + width)
    assert 2 <= len(at) <= 7
    assert all(low - 1e-6 * width <= tick <= low + width + 1e-6 * width for tick in at)
    steps = [b - a for a, b in pairwise(at)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@given(low=st.floats(0, 0.9), width=st.floats(0.01, 0.1))
def test_tick_labels_tell_ticks_apart(low, width):
    labels = svg.tick_labels(svg.ticks(low, low + width), percent=True)
    assert len(set(labels)) == len(labels)


@given(st.lists(st.floats(0, 1), min_size=1))
def test_domain_holds_its_values_and_is_never_empty(values):
    low, high = svg.domain(values, 0.04, (0, 1))
    assert 0 <= low <= min(values) and max(values) <= high <= 1
    assert high - low >= 0.02 - 1e-12


@given(st.text())
def test_any_text_stays_text(words):
    markup = ElementTree.fromstring(svg.text(0, 0, words, class_="label", data_name=words))
    assert len(markup) == 0
    assert (markup.text or "") == svg.NOT_XML.sub("", words).replace("\r\n", "\n").replace("\r", "\n")


@given(st.text(), st.floats(20, 300))
def test_shortened_text_fits(words, width):
    assert svg.text_width(svg.shorten(words, width)) <= width


@pytest.mark.parametrize("colours", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_words_and_marks_stand_out_from_the_paper(colours):
    for name, colour in colours.items():
        least = {"paper": 0, "panel": 0, "grid": 0, "ink": 7, "soft": 4.5}.get(name, 3)
        assert contrast(colour, colours["paper"]) >= least, name


def contrast(a: str, b: str) -> float:
    """As WCAG 2 defines it: 4.5 for text, 3 for marks."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
