from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.report.figures import class_counts, per_client, thin, trade_off, training_curve

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = [trade_off, training_curve, per_client]


def parse(figure: str) -> ElementTree.Element:
    """A well-formed figure that a screen reader can name."""
    root = ElementTree.fromstring(figure)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    return root


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


def test_trade_off_has_one_labelled_point_per_method(make_results):
    root = parse(trade_off(make_results(seeds=3)))
    assert len(of_class(root, "point")) == 5
    assert {node.text for node in of_class(root, "label")} == {
        "FedAvg", "Local", "Fine-tuned", "Specialist mixture", "Local-global mixture",
    }  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_points_are_placed_as_their_accuracies(make_results, accuracies):
    results = []
    for i, (own, everyone) in enumerate(accuracies):
        (result,) = make_results(("fedavg",), clients=1, rounds=1)
        for score in result["scores"]:
            score["accuracy"] = own if score["data"] == "own" else everyone
        results.append(result | {"title": f"method {i}"})
    points = of_class(parse(trade_off(results)), "point")
    places = [(float(point.get("cx")), float(point.get("cy"))) for point in points]
    for (x, y), (own, everyone) in zip(places, accuracies, strict=True):
        for (other_x, other_y), (other_own, other_everyone) in zip(places, accuracies, strict=True):
            assert x <= other_x or everyone > other_everyone
            assert y >= other_y or own > other_own  # SVG counts downwards


@pytest.mark.parametrize(("name", "words"), [("fedavg", "own 25.0%"), ("fine_tuned", "own 75.0%")])
@pytest.mark.parametrize("figure", [trade_off, per_client])
def test_the_headline_score_is_after_personalisation_if_there_is_any(make_results, figure, name, words):
    (result,) = make_results((name,))
    for score in result["scores"]:
        score["accuracy"] = 0.75 if score["model"] == "after" else 0.25
    words = words if figure is trade_off else words.replace("own", "mean")
    assert words in figure([result])


@pytest.mark.parametrize(("seeds", "crosses"), [(1, 0), (2, 5)])
def test_an_interval_needs_two_seeds(make_results, seeds, crosses):
    assert len(of_class(parse(trade_off(make_results(seeds=seeds))), "interval")) == crosses


def test_methods_with_the_same_rounds_share_a_line(make_results):
    results = make_results()
    lines = list(parse(training_curve(results)).iter(f"{SVG}polyline"))
    assert len(lines) == 1
    results[0]["history"][3]["reports"]["training_loss"] += 1
    assert len(list(parse(training_curve(results)).iter(f"{SVG}polyline"))) == 2


def test_long_histories_are_thinned(make_results):
    (line,) = parse(training_curve(make_results(("fedavg",), rounds=5000))).iter(f"{SVG}polyline")
    assert len(line.get("points").split()) == 300


@settings(deadline=None)
@given(length=st.integers(1, 2000), most=st.integers(2, 400))
def test_thinning_keeps_order_and_both_ends(length, most):
    points = [(i, 0.0) for i in range(length)]
    kept = thin(points, most)
    assert len(kept) == min(length, most)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_a_method_without_rounds_has_no_curve(make_results):
    assert training_curve(make_results(("local_only",))) == ""


def test_rounds_are_whole_numbers(make_results):
    root = parse(training_curve(make_results(("fedavg",), rounds=2)))
    assert [node.text for node in of_class(root, "soft") if node.get("text-anchor") == "middle"] == ["1", "2"]


def test_a_round_without_a_loss_is_skipped(make_results):
    (result,) = make_results(("fedavg",), rounds=3)
    result["history"][1]["reports"] = {}
    (line,) = parse(training_curve([result])).iter(f"{SVG}polyline")
    assert len(line.get("points").split()) == 2


@pytest.mark.parametrize("clients", [1, 12, 1000])
def test_every_client_is_a_dot(make_results, clients):
    root = parse(per_client(make_results(clients=clients, unseen=3)))
    assert [node.get("d").count("M") for node in of_class(root, "dots")] == [clients] * 5
    assert len(of_class(root, "mean")) == 5


@settings(deadline=None)
@given(
    st.integers(1, 80).flatmap(lambda k: st.lists(st.lists(st.integers(0, 500), min_size=k, max_size=k), min_size=1))
)
def test_every_client_and_class_with_examples_is_a_cell(counts):
    root = parse(class_counts(counts, [f"class {k}" for k in range(len(counts[0]))]))
    cells = sum(node.get("d").count("M") for node in of_class(root, "cells"))
    assert cells == sum(count > 0 for row in counts[:60] for count in row)


@pytest.mark.parametrize(("clients", "says"), [(60, False), (61, True), (200, True)])
def test_a_heat_map_says_that_it_was_cut(clients, says):
    assert ("Only the first 60 clients are shown." in class_counts([[1, 2]] * clients, ["a", "b"])) == says


@pytest.mark.parametrize("counts", [[], [[]]])
def test_no_counts_no_heat_map(counts):
    assert class_counts(counts, []) == ""


@pytest.mark.parametrize("figure", FIGURES)
def test_no_scores_and_no_rounds_no_figure(figure, make_results):
    assert figure([]) == ""
    assert figure([make_results(("fedavg",))[0] | {"scores": [], "history": []}]) == ""


@pytest.mark.parametrize("figure", FIGURES)
@settings(deadline=None)
@given(title=st.text())
def test_any_title_gives_a_well_formed_figure(make_results, figure, title):
    parse(figure([make_results(("fedavg",), clients=2, rounds=2)[0] | {"title": title}]))


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=12))
def test_any_class_name_gives_a_well_formed_figure(names):
    parse(class_counts([[1] * len(names)], names))
