"""The page in a real browser: no error, charts drawn, and the controls do what they say."""

import json
import shutil
from pathlib import Path

import pytest

from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: needs chromium and chromium-driver"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def with_experts(run):
    shares = [[0.9, 0.1], [0.2, 0.8]]
    history = [{**event, "experts": {"load": [0.4, 0.6], "usage_entropy": 0.6}} for event in run["history"]]
    maps = [{"round": number, "of": "label", "shares": shares} for number in (1, 5)]
    curve = [
        {"round": n, "bytes_up": n, "bytes_down": n, "own": 0.5, "global": 0.4, "unseen": None, "pooled": None}
        for n in (1, 2, 3)
    ]
    sent = {"sent_by_clients": {"train": {"model/weight": {"bytes": 4000}, "model/bias": {"bytes": 40}}}}
    return StoredRun(run | {"history": history, "curve": curve, "class_names": ["a", "b"]}, sent, maps)


@pytest.fixture
def page(browser, make_results, tmp_path):
    runs = [with_experts(run) for run in make_results(seeds=2, clients=30, classes=2)]
    file = tmp_path / "report.html"
    file.write_text(render(runs, "Digits"), encoding="utf-8")
    browser.get(file.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def count(page, selector):
    return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def act(page, script):
    page.execute_script(script)


def test_every_figure_is_drawn_and_can_be_heard(page):
    empty = page.execute_script(
        "return [...document.querySelectorAll('figure')].filter(f =>"
        " !f.querySelector('.chart svg path, .chart svg circle, .chart svg rect')).map(f => f.dataset.figure)"
    )
    assert empty == [] and count(page, "figure") >= 10
    assert count(page, "figure .chart[aria-label]") == count(page, "figure")


def test_hiding_a_method_takes_it_out_of_every_figure(page):
    before = count(page, "[data-figure='own-global'] circle")
    act(page, "document.querySelector('.filters input').click()")
    assert (
        count(page, "[data-figure='own-global'] circle") == before - 31
    )  # thirty clients, and its place in the legend
    assert count(page, "tr.hidden") == 1
    act(page, "document.querySelector('.filters input').click()")
    assert count(page, "[data-figure='own-global'] circle") == before


def test_a_picked_client_is_marked_and_its_numbers_are_shown(page):
    act(page, "const c = document.getElementById('client'); c.value = '3'; c.dispatchEvent(new Event('change'))")
    text = page.execute_script("return document.querySelector('.picked').innerText")
    assert "client 3" in text and "Specialist mixture" in text
    assert count(page, "[data-figure='worth'] circle[r='8']") == 4  # every method but training alone


def test_another_seed_shows_other_clients(page):
    strip = "return document.querySelector(\"[data-figure='strips'] .chart\").textContent"
    first = page.execute_script(strip)
    act(page, "const s = document.querySelector('.filters select'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert page.execute_script(strip) != first


DRAG = """
const svg = document.querySelector("[data-figure='training-loss'] .chart svg"), box = svg.getBoundingClientRect();
const at = (type, x, y, target) => target.dispatchEvent(new PointerEvent(type,
  {clientX: box.left + x, clientY: box.top + y, bubbles: true, button: 0, pointerType: 'mouse'}));
at('pointerdown', 100, 80, svg); at('pointermove', 200, 160, window); at('pointerup', 200, 160, window);
"""
TICKS = "return document.querySelector(\"[data-figure='training-loss'] [aria-label='x-axis tick label']\").textContent"
RESET = "document.querySelector(\"[data-figure='training-loss'] button\")"


def test_dragging_zooms_and_the_button_resets(page):
    whole = page.execute_script(TICKS)
    act(page, DRAG)
    assert page.execute_script(TICKS) != whole
    assert page.execute_script(f"return {RESET}.hidden") is False
    act(page, f"{RESET}.click()")
    assert page.execute_script(TICKS) == whole


def test_the_keyboard_zooms_too(page):
    whole = page.execute_script(TICKS)
    chart = "document.querySelector(\"[data-figure='training-loss'] .chart\")"
    key = chart + ".dispatchEvent(new KeyboardEvent('keydown', {{key: '{}'}}))"
    for pressed in "++":
        act(page, key.format(pressed))
    assert page.execute_script(TICKS) != whole
    act(page, key.format("0"))
    assert page.execute_script(TICKS) == whole


def test_curves_can_be_seen_over_bytes_and_maps_at_earlier_rounds(page):
    change(page, "learning-curves", "select", 1)
    shown = page.execute_script("return document.querySelector(\"[data-figure='learning-curves']\").textContent")
    assert "GB sent" in shown
    change(page, "expert-map-0", "input", 0)
    said = page.execute_script("return document.querySelector(\"[data-figure='expert-map-0'] output\").value")
    assert said == "round 1"


def change(page, figure, control, value):
    script = """const found = document.querySelector(`[data-figure='${arguments[0]}'] ${arguments[1]}`);
    found.value = arguments[2]; for (const kind of ['input', 'change']) found.dispatchEvent(new Event(kind));"""
    page.execute_script(script, figure, control, value)


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_a_phone_and_a_dark_screen_can_read_it(page, width, scheme):
    device = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.refresh()
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    contrast = page.execute_script(CONTRAST)
    assert contrast and min(contrast) >= 4.5, "WCAG AA for text"
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


# Of headings, notes, cells and captions against the page, and of every colour of a line (which may be 3).
CONTRAST = """
const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((s, c, i) => s + c * [0.2126, 0.7152, 0.0722][i], 0);
const paper = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('h1, h2, .note, td, figcaption, dt, .swatch, .warnings')].map((one) => {
  const ink = light(getComputedStyle(one).color);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
});
"""


def test_a_printed_page_has_no_controls_and_all_of_the_configuration(page):
    act(page, "window.dispatchEvent(new Event('beforeprint'))")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = page.execute_script(
        "return [getComputedStyle(document.querySelector('.filters')).display, document.querySelector('details').open]"
    )
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown == ["none", True]


def test_a_thousand_clients_are_drawn_in_seconds(browser, make_results, tmp_path):
    file = Path(tmp_path / "large.html")
    runs = [StoredRun(run) for run in make_results(seeds=2, clients=1000, rounds=2000, classes=100)]
    file.write_text(render(runs, "Large"), encoding="utf-8")
    browser.set_page_load_timeout(60)
    browser.get(file.as_uri())
    assert count(browser, "[data-figure='own-global'] circle") > 4000
    assert json.dumps(browser.get_log("browser")) == "[]"
