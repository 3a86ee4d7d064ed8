import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe import report
from fedmoe.report.html import render

VOID = {"meta"}


class Page(HTMLParser):
    """Tags, attributes and text of a page whose tags are all closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def row(title: str, **changes) -> dict:
    cell = {"mean": 0.714, "interval": None, "spread": 0.05, "worst_decile": 0.612, "before": None}
    return {"title": title, "own": cell, "global": cell, "unseen": None, "seeds": 1} | changes


def test_a_page_needs_no_network(make_results):
    page = render(make_results(seeds=2, unseen=3), "Digits")
    assert set(re.findall(r"https?://[^\"' <]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<link|<script|<img|<iframe", page)
    assert not {name for name, _ in Page(page).attributes} & {"src", "href", "srcset", "onclick", "onload"}


def test_a_page_tells_what_was_run(make_results):
    text = Page(render(make_results(seeds=2, unseen=3), "Digits")).text
    for words in (
        "fedmoe compare configs/digits.toml",
        "ab12cd0, ab12cd1",
        "12, and 3 unseen",
        "62,006",
        "torch 2.13.0",
    ):
        assert words in text


def test_the_ids_of_a_page_are_unique(make_results):
    ids = [value for name, value in Page(render(make_results(), "Digits")).attributes if name == "id"]
    assert len(ids) == len(set(ids)) == 8


HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</title></svg><b>", "&amp;", "\x00\ud800'"]


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_names_are_only_text(make_results, words):
    def named(words: str) -> str:
        (result,) = make_results(("fine_tuned",), clients=3, classes=2)
        names = {"name": words, "title": words, "command": words, "split_digest": words, "backend": words}
        nested = {"config": {words: {words: words}}, "versions": {words: words}, "class_names": [words, words]}
        return render([result | names | nested], words)

    page, harmless = Page(named(words)), Page(named("harmless"))
    assert page.tags == harmless.tags
    assert [name for name, _ in page.attributes if name != "transform"] == [
        name for name, _ in harmless.attributes if name != "transform"
    ]
    named(words).encode()


@settings(deadline=None)
@given(title=st.text())
def test_any_title_is_a_well_formed_page(make_results, title):
    (result,) = make_results(("fedavg",), clients=1, rounds=1, classes=1)
    Page(render([result], title, [row(title)])).text.encode()


def test_a_row_shows_its_numbers():
    score = {"mean": 0.714, "interval": 0.013, "spread": 0.05, "worst_decile": 0.612, "before": 0.65}
    text = Page(render([], "Digits", [row("FedAvg", own=score, seeds=3)])).text
    for words in ("71.4 ± 1.3", "65.0 → 71.4", "61.2", "5.0", "over 3 seeds"):
        assert words in text


def test_one_seed_promises_no_interval(make_results):
    text = Page(render(make_results(), "Digits")).text
    assert "One seed: no interval." in text
    assert "± " not in text and "cross" not in text


def test_the_column_of_unseen_clients_appears_with_them(make_results):
    assert "Unseen clients" not in render(make_results(), "Digits")
    assert "Unseen clients" in render(make_results(unseen=2), "Digits")


def test_only_the_highest_mean_is_bold():
    cell = row("a")["own"]
    rows = [row("a", own=cell | {"mean": 0.5}), row("b", own=cell | {"mean": 0.9}, **{"global": None})]
    assert re.findall("<b>(.*?)</b>", render([], "Digits", rows)) == ["71.4", "90.0"]


def test_configuration_is_split_into_shared_and_own(make_results):
    page = render(make_results(("fedavg", "fine_tuned")), "Digits")
    assert page.count("data.name = ") == 1
    assert page.count("algorithm.name = ") == 2


@pytest.mark.parametrize(
    ("changes", "num_figures"),
    [
        ({"names": ("local_only",), "clients": 1, "classes": 1}, 3),
        ({"clients": 1000, "rounds": 1000, "classes": 100}, 4),
    ],
)
def test_small_and_large_comparisons_fit_a_small_page(make_results, changes, num_figures):
    page = render(make_results(**changes), "Digits")
    assert page.count("<figure>") == num_figures
    assert len(page) < 400_000


def test_what_is_missing_is_left_out(make_results):
    (result,) = make_results(("fedavg",))
    page = render([result | {"class_counts": [], "traffic": {}, "history": []}], "Digits")
    assert page.count("<figure>") == 2
    assert "What left the clients" not in page


# What a run always stores, and `fedmoe.storage` checks when it reads.
STORED = {
    "name", "algorithm", "title", "seed", "config", "versions", "scores", "history", "traffic", "rounds", "seconds",
}  # fmt: skip


def test_a_result_without_what_need_not_be_there_is_still_a_page(make_results):
    (result,) = make_results(("fine_tuned",))
    render([{key: value for key, value in result.items() if key in STORED}], "Digits")
    render([result | {"traffic": {"bytes_up": 1, "bytes_down": 2}}], "Digits")


def test_a_report_is_made_without_tensors():
    allowed = {*sys.stdlib_module_names, "numpy", "fedmoe.report", "fedmoe.evaluation.summary", "fedmoe.errors"}
    allowed |= {
        f"fedmoe.{name}" for name in ("storage.files", "evaluation.metric_catalog", "evaluation.figure_of_merit")
    }
    for file in Path(report.__file__).parent.glob("*.py"):
        for name in re.findall(r"^(?:from|import) ([\w.]+)", file.read_text("utf-8"), re.MULTILINE):
            parents = {".".join(name.split(".")[:i]) for i in range(1, 4)}
            assert parents & allowed, f"{file.name} imports {name}"
