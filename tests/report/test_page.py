import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun


def page_of(results, title="Digits", **more):
    return render([StoredRun(result) for result in results], title, **more)


class Page(HTMLParser):
    """Tags, attributes and text of a page; what scripts hold is kept apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text, self.scripts = "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self.tags[-1:] == ["script"] or self.tags[-1:] == ["style"]:
            self.scripts.append(data)
        else:
            self.text += data

    @property
    def data(self):
        return json.loads(next(script for script in self.scripts if script.startswith("{")))


def test_a_page_needs_no_network(make_results):
    page = page_of(make_results(seeds=2, unseen=3))
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(http|<link|<img|<iframe|<script src", page)
    targets = {value for name, value in Page(page).attributes if name in ("src", "href", "srcset", "action")}
    assert targets == {"#content"}


def test_a_page_tells_what_was_run(make_results):
    text = Page(page_of(make_results(seeds=2, unseen=3))).text
    for words in (
        "fedmoe compare configs/digits.toml", "ab12cd0, ab12cd1", "12, and 3 unseen", "62,006", "torch 2.13.0",
    ):  # fmt: skip
        assert words in text


def test_every_figure_has_data_to_draw_and_words_to_hear(make_results):
    page = Page(page_of(make_results(seeds=2)))
    placed = [value for name, value in page.attributes if name == "data-figure"]
    assert sorted(placed) == sorted(page.data["figures"]) == sorted(set(placed))
    said = [value for name, value in page.attributes if name == "aria-label"]
    assert any("FedAvg: own 6" in words for words in said)


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script></title><b>",
    "&amp;",
    "{{ 7 * 7 }}",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_names_are_only_text(make_results, words):
    def named(words: str) -> str:
        (result,) = make_results(("fine_tuned",), clients=3, classes=2)
        names = {"name": words, "title": words, "command": words, "split_digest": words, "backend": words}
        nested = {"config": {words: {words: words}}, "versions": {words: words}, "class_names": [words, words]}
        clients = {"client_names": {"0": words}, "warnings": [words]}
        return page_of([result | names | nested | clients], words, problems=[words])

    page, harmless = Page(named(words)), Page(named("harmless"))
    assert page.tags == harmless.tags
    assert [name for name, _ in page.attributes] == [name for name, _ in harmless.attributes]
    assert words in page.text and page.data["methods"] == [words]


@settings(deadline=None, max_examples=20)
@given(title=st.text())
def test_any_title_is_a_page(make_results, title):
    (result,) = make_results(("fedavg",), clients=1, rounds=1, classes=1)
    assert Page(page_of([result | {"title": title}], title)).data["methods"] == [title]


def test_a_row_shows_its_numbers(make_results):
    (result,) = make_results(("fine_tuned",), clients=1)
    text = Page(page_of([result])).text
    after, before = (
        next(s["accuracy"] for s in result["scores"] if (s["model"], s["data"]) == (model, "own"))
        for model in ("after", "before")
    )
    assert f"{100 * before:.1f} → {100 * after:.1f}" in text
    assert "One seed: no interval." in text and "± " not in text


def test_the_column_of_unseen_clients_appears_with_them(make_results):
    assert "Unseen clients" not in page_of(make_results())
    assert "Unseen clients" in page_of(make_results(unseen=2))


def test_only_the_highest_mean_is_bold(make_results):
    bold = re.findall("<b>(.*?)</b>", page_of(make_results(("fedavg", "fine_tuned"))))
    assert len(bold) == 2
    assert not re.findall("<b>", page_of(make_results(("fedavg",))))


def test_configuration_is_split_into_shared_and_own(make_results):
    page = page_of(make_results(("fedavg", "fine_tuned")))
    assert page.count("data.name = ") == 1 and page.count("algorithm.name = ") == 2


def test_a_thousand_clients_and_two_thousand_rounds_fit_a_small_page(make_results):
    """Five methods, four seeds: the page is mostly the library that draws it."""
    assert len(page_of(make_results(seeds=4, clients=1000, rounds=2000, classes=100))) < 2_000_000
    assert len(page_of(make_results(("local_only",), clients=1, classes=1))) < 400_000


def test_what_is_missing_is_left_out(make_results):
    (result,) = make_results(("fedavg",))
    page = page_of([result | {"class_counts": [], "traffic": {}, "history": []}])
    assert "What left the clients" not in page and "The split" not in page and "<h2>Training</h2>" not in page


def test_warnings_and_runs_that_could_not_be_read_are_said(make_results):
    (result,) = make_results(("fedavg",))
    text = Page(page_of([result | {"warnings": ["round 9: expert 0 is dead"]}], problems=["runs/x is no run."])).text
    assert "FedAvg, seed 0, round 9: expert 0 is dead" in text
    assert "Not reported" in text and "runs/x is no run." in text


# What a run always stores, and `fedmoe.storage` checks when it reads.
STORED = {
    "name", "algorithm", "title", "seed", "config", "versions", "scores", "history", "traffic", "rounds", "seconds",
}  # fmt: skip


def test_a_result_without_what_need_not_be_there_is_still_a_page(make_results):
    (result,) = make_results(("fine_tuned",))
    page_of([{key: value for key, value in result.items() if key in STORED}])
    page_of([result | {"traffic": {"bytes_up": 1, "bytes_down": 2}}])


def test_a_report_is_made_without_tensors():
    code = "import sys, fedmoe.report.comparability; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
