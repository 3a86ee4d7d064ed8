"""What can be reproduced is declared well, and numbers stand beside numbers."""

import json
import re
from pathlib import Path

import pytest

from fedmoe.config import read_config
from fedmoe.errors import ConfigError
from fedmoe.report.grid import GridPoint
from fedmoe.report.grid_figures import _shares
from fedmoe.report.runs import StoredRun
from fedmoe.report.sweep import entry_text, markdown_grid, part_tables, render_grid, shown_tables
from fedmoe.sweeps.reproduction import beside, choose, find, read

HOME = Path(__file__).parents[2] / "configs" / "reproduce"
FOUND = find(HOME)


@pytest.mark.parametrize("one", FOUND, ids=lambda one: one.name)
def test_every_file_plans_runs_whose_methods_its_numbers_and_claims_name(one, tmp_path):
    titles = {
        cell.config.algorithm.label or cell.config.algorithm.entry.title for cell in one.cells(tmp_path, one.seeds)
    }
    named = {method for printed in one.published for method in printed.methods}
    named |= {title for claim in one.claims for title in (claim.method, claim.than)}
    assert named <= titles, named - titles
    folders = [cell.directory for cell in one.cells(tmp_path, one.seeds)]
    assert len(folders) == len(set(folders)), "two runs in one folder"
    assert 1 <= len(one.cells(tmp_path, [0], quick=True)) <= 6


def test_runs_in_one_folder_are_the_same_runs_whichever_figure_asks(tmp_path):
    known = {}
    for one in FOUND:
        for cell in one.cells(tmp_path, [0]):
            asked = cell.config.model_dump(mode="json", exclude={"name", "compare"})
            assert known.setdefault(cell.directory, asked) == asked, (one.name, cell.label)
    shared = [one for one in FOUND if one.runs_of]
    assert shared and all(one.runs_of in {other.figure for other in FOUND} for one in shared)


def test_figures_with_the_same_public_rows_network_and_seed_share_a_common_expert(tmp_path):
    def files(name, seed, **how):
        (one,) = choose(FOUND, "002", name)
        return {cell.config.common_expert.weights for cell in one.cells(tmp_path, [seed], **how)}

    assert files("table1-cifar10", 0) == files("table3-cifar10", 0) != files("table1-cifar10", 1)
    assert files("table1-cifar10", 0).isdisjoint(files("table1-cifar100", 0) | files("table1-cifar10", 0, quick=True))
    assert len(files("figure4", 0)) == 3, "one for each accuracy"
    (one,) = choose(FOUND, "002", "table2")
    for cell in one.cells(tmp_path, [0]):
        assert cell.config.model.start_from in (None, cell.config.common_expert.weights)


def test_names_are_unique_and_an_unknown_one_is_said_with_the_nearest():
    names = [one.name for one in FOUND]
    assert len(names) == len(set(names)) and {one.paper for one in FOUND} == {"000", "001", "002", "003", "004"}
    assert [one.figure for one in choose(FOUND, "001", "table2")] == ["table2"]
    with pytest.raises(ConfigError, match=r"no paper '0000'.*'000'"):
        choose(FOUND, "0000", None)
    with pytest.raises(ConfigError, match=r"has no 'table22'.*'table2'"):
        choose(FOUND, "001", "table22")


def test_a_row_that_does_not_fit_and_a_misspelt_key_are_named(tmp_path):
    text = (HOME / "001_table2.toml").read_text()
    (tmp_path / "a.toml").write_text(text.replace("[[0.8], [39.14,", "[[0.8], ["))
    with pytest.raises(ConfigError, match=r"a.toml: the published row \[0.8\]"):
        read(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text(text.replace("claims", "claim"))
    with pytest.raises(ConfigError, match=r"b.toml: claim"):
        read(tmp_path / "b.toml")
    with pytest.raises(ConfigError, match="holds nothing to reproduce"):
        find(tmp_path / "empty")


def result(title, seed, share, accuracy, make_results):
    (made,) = make_results(("fedavg",), clients=3)
    scores = [score | {"accuracy": accuracy} for score in made["scores"]]
    return StoredRun(made | {"title": title, "seed": seed, "scores": scores})


@pytest.fixture
def points(make_results):
    """The mixture is a point ahead at 0.8 and half a point behind at 1.0, in four seeds."""
    made = []
    for share, ahead in ((0.8, 0.01), (1.0, -0.005)):
        runs = [
            result(title, seed, share, 0.6 + 0.001 * seed + extra, make_results)
            for seed in range(4)
            for title, extra in (("Fine-tuned", 0.0), ("Local-global mixture", ahead))
        ]
        made.append(GridPoint((("split.share", share),), runs))
    return made


def test_our_mean_and_interval_stand_beside_the_published_value(points):
    one = choose(FOUND, "001", "table2")[0]
    own = next(table for table in part_tables(points, beside(one, points)) if table.part == "own")
    assert own.methods == ["Fine-tuned", "Local-global mixture"]
    (values, (tuned, mixture)), _ = own.rows
    assert values == ["0.8"] and (tuned.published, mixture.published) == ("65.61", "67.17")
    assert re.fullmatch(r"61\.\d ± 0\.2 \(67\.17\)", entry_text(mixture)) and mixture.seeds == 4
    assert "(65.61)" in markdown_grid(points, beside(one, points))


def test_a_grid_of_one_point_is_one_table_with_a_row_for_each_method(make_results):
    point = GridPoint((), [result(title, 0, 0, 0.5, make_results) for title in ("FedJETs", "Common expert")])
    (one,) = choose(FOUND, "002", "table6")
    (table,) = shown_tables([point], beside(one, [point]))
    assert table.keys == ["Method"] and [row[0] for row in table.rows] == [["FedJETs"], ["Common expert"]]
    assert "Own data" in table.methods and "| FedJETs | 50.0" in markdown_grid([point], beside(one, [point]))


def test_the_page_draws_scores_over_the_grid_and_own_against_global(points):
    page = render_grid(points, "Table", [], None)
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["figures"]
    (own, *_) = drawn["grid"]["views"]
    assert own["series"][1]["points"] == [[0.8, 0.6115], [1.0, 0.5965]]
    assert {point["name"] for point in drawn["own-against-global"]["points"]} >= {"Fine-tuned 0.8", "Fine-tuned 1.0"}


def test_shares_are_of_the_base_at_the_same_point():
    lines = {"FedAvg": {"points": [[1, 0.5], [2, 0.0]]}, "other": {"points": [[1, 0.4], [2, 0.3], [3, 0.2]]}}
    assert _shares(lines, "FedAvg")["other"]["points"] == [[1, 0.8]]


def test_claims_are_decided_point_by_point(points):
    (claim,) = beside(choose(FOUND, "001", "table2")[0], points).claims
    assert [(line["at"], line["verdict"]) for line in claim["lines"]] == [
        ("share = 0.8", "holds"), ("share = 1.0", "does not hold"),
    ]  # fmt: skip
    few = [GridPoint(point.point, point.runs[:6]) for point in points]
    assert {line["verdict"] for line in beside(choose(FOUND, "001", "table2")[0], few).claims[0]["lines"]} == {
        "undecided"
    }


def test_a_corrected_value_is_marked_with_its_reason(make_results):
    one = choose(FOUND, "000", "table1-ag-news")[0]
    point = GridPoint((("split.share", 0.7),), [result("FedAvg", 0, 0.7, 0.78, make_results)])
    page = render_grid([point], one.title, [], beside(one, [point]))
    assert "published 10.42; corrected 79.2*" in page and "four balanced classes cannot give 10%" in page
    assert "Where this differs from the paper" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["methods"] == ["FedAvg"]


def test_quick_configs_need_no_data_set():
    for path in sorted((HOME / "quick").glob("*.toml")):
        assert read_config(path).data.name in ("digits", "synthetic_regression")
