from xml.etree import ElementTree

import pytest

from fedmoe.report.expert_figures import assignment, expert_load
from fedmoe.report.html import render

SVG = "{http://www.w3.org/2000/svg}"


def watched(result, num_experts=3, rows=10, of="label"):
    loads = [(k + 1) / sum(range(1, num_experts + 1)) for k in range(num_experts)]
    history = [{**event, "experts": {"load": loads}} for event in result["history"]]
    shares = [[float(k == row % num_experts) for k in range(num_experts)] for row in range(rows)]
    return result | {"history": history, "assignment": {"of": of, "shares": shares}}


@pytest.mark.parametrize("num_experts", [2, 4, 20])
def test_every_expert_is_a_line_of_its_load(make_results, num_experts):
    root = ElementTree.fromstring(expert_load(watched(make_results(("fedavg",))[0], num_experts), "load"))
    assert len(list(root.iter(f"{SVG}polyline"))) == num_experts


def test_every_row_marks_its_expert_and_classes_have_their_names(make_results):
    root = ElementTree.fromstring(assignment(watched(make_results(("fedavg",), classes=10)[0]), "map"))
    cells = [node for node in root.iter(f"{SVG}path") if "cells" in node.get("class", "")]
    assert sum(node.get("d").count("M") for node in cells) == 10
    assert {str(k) for k in range(10)} <= {node.text for node in root.iter(f"{SVG}text")}


def test_a_map_of_clients_says_so_and_that_it_was_cut(make_results):
    drawn = assignment(watched(make_results(("fedavg",))[0], rows=100, of="client"), "map")
    assert "Experts of each client" in drawn and "Only the first 60 rows are shown." in drawn


def test_one_expert_or_none_draws_nothing(make_results):
    plain = make_results(("fedavg",))[0]
    for run in (plain, watched(plain, num_experts=1)):
        assert expert_load(run, "load") == assignment(run, "map") == ""
    assert ">Experts<" not in render([plain], "Digits")


def test_figures_of_several_methods_have_names_of_their_own(make_results):
    page = render([watched(run) for run in make_results(("fedavg", "fine_tuned"), seeds=2)], "Digits")
    for name in ("expert-load-0", "expert-load-1", "assignment-0", "assignment-1"):
        assert page.count(f'id="{name}-title"') == 1
    assert "Seed 0." in page
