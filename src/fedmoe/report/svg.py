"""The few SVG pieces that our figures are made of: no dependency, no network, light and dark.

Every figure stands alone: it carries its own style, so it can be saved as a file or placed in a page.
Lengths are pixels of a drawing that is `WIDTH` wide; the page scales it.
"""

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTH = 640.0
FONT = 13.0
NUM_COLOURS = 8
DASHES = ("none", "7 3", "2 3", "9 3 2 3")  # lines differ by more than their colour

# s0 … s7 are the colours of methods, in an order that stays apart for colour-blind readers.
LIGHT = {"paper": "#ffffff", "panel": "#f6f7f9", "ink": "#1b2430", "soft": "#566270", "grid": "#dfe3e8"} | {
    f"s{i}": c
    for i, c in enumerate(("#0067a8", "#c2500a", "#00805c", "#a03a86", "#8a6900", "#5b4fc4", "#b3263a", "#4d5b69"))
}
DARK = {"paper": "#14181d", "panel": "#1d2329", "ink": "#e8ecf0", "soft": "#a3afbb", "grid": "#333c46"} | {
    f"s{i}": c
    for i, c in enumerate(("#5db4f0", "#f58f4c", "#35c79a", "#e48acb", "#dcb43c", "#a69cf5", "#f27685", "#a9b7c4"))
}
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def colour_rules(selector: str) -> str:
    """The colours as CSS variables of `selector`, for light and dark readers."""
    light, dark = ("".join(f"--{name}:{value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f"{selector}{{{light}}}@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


STYLE = (
    colour_rules(".figure")
    + ".figure{font:13px system-ui,sans-serif;fill:var(--ink)}.figure .soft{fill:var(--soft)}"
    + ".figure .grid{stroke:var(--grid)}.figure .lead{stroke:var(--soft)}.figure .panel{fill:var(--panel)}"
    + ".figure .halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}"
    + "".join(f".figure .s{i}{{color:var(--s{i})}}" for i in range(NUM_COLOURS))
)


class Scale(NamedTuple):
    """Values from `low` to `high` drawn from pixel `start` to pixel `end`.

    >>> Scale(0, 1, 100, 300)(0.25)
    150.0
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class Frame(NamedTuple):
    """The sides of the area that holds the data."""

    left: float
    top: float
    right: float
    bottom: float


def escape(words: object) -> str:
    """Safe as text and inside quotes, in HTML and XML; characters that XML forbids are dropped."""
    return html.escape(NOT_XML.sub("", str(words)))


def number(value: float) -> str:
    """
    >>> number(12.0), number(1 / 3)
    ('12', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(tag: str, *children: str, **attributes: object) -> str:
    """Children are markup; attributes are escaped. `class_` is `class`, `stroke_width` is `stroke-width`.

    >>> element("line", x1=1, class_="grid")
    '<line x1="1" class="grid"/>'
    """
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, float) else escape(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{pairs}>{''.join(children)}</{tag}>" if children else f"<{tag}{pairs}/>"


def text(x: float, y: float, words: object, anchor: str = "start", **attributes: object) -> str:
    return element("text", escape(words), x=float(x), y=float(y), text_anchor=anchor, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def text_width(words: str, size: float = FONT) -> float:
    """An upper estimate: the reader's font is not known here."""
    return size * sum(1.05 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in words)


def shorten(words: str, width: float) -> str:
    """
    >>> shorten("Local-global mixture", 80)
    'Local-glo…'
    """
    words = " ".join(NOT_XML.sub("", words).split())
    if text_width(words) <= width:
        return words
    while words and text_width(words + "…") > width:
        words = words[:-1]
    return words.rstrip() + "…"


def domain(
    values: Iterable[float], least: float, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """A range a little wider than the values, at least `least` wide, within `bounds`.

    >>> domain([0.5], 0.1), domain([0, 1], 0.1, (0, 1))
    ((0.45, 0.55), (0, 1))
    """
    values = list(values)
    low, high = min(values), max(values)
    pad = max(0.08 * (high - low), (least - (high - low)) / 2)
    return max(bounds[0], low - pad), min(bounds[1], high + pad)


def ticks(low: float, high: float) -> list[float]:
    """Two to seven round numbers from `low` to `high`, evenly spaced by 1, 2 or 5 times a power of ten.

    >>> ticks(0.32, 0.71)
    [0.4, 0.5, 0.6, 0.7]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * 6 >= high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_labels(values: Sequence[float], percent: bool = False) -> list[str]:
    """
    >>> tick_labels([0.5, 0.6], percent=True), tick_labels([0, 0.5, 1])
    (['50 %', '60 %'], ['0.0', '0.5', '1.0'])
    """
    scaled = [100 * value if percent else value for value in values]
    step = scaled[1] - scaled[0] if len(scaled) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    unit = " %" if percent else ""
    return [(f"{v:.{digits}f}" if abs(v) < 1e5 else f"{v:.2g}") + unit for v in scaled]


def x_axis(scale: Scale, frame: Frame, title: str, percent: bool = False, whole: bool = False) -> str:
    """`whole` shows whole numbers only: there is no round 1.5."""
    at = [tick for tick in ticks(scale.low, scale.high) if not whole or tick.is_integer()]
    marks = "".join(
        line(scale(v), frame.top, scale(v), frame.bottom, class_="grid")
        + text(scale(v), frame.bottom + 18, label, "middle", class_="soft")
        for v, label in zip(at, tick_labels(at, percent), strict=True)
    )
    return marks + text((frame.left + frame.right) / 2, frame.bottom + 40, title, "middle")


def y_axis(scale: Scale, frame: Frame, title: str, percent: bool = False) -> str:
    at = ticks(scale.low, scale.high)
    marks = "".join(
        line(frame.left, scale(v), frame.right, scale(v), class_="grid")
        + text(frame.left - 8, scale(v) + 4, label, "end", class_="soft")
        for v, label in zip(at, tick_labels(at, percent), strict=True)
    )
    x, y = 14.0, (frame.top + frame.bottom) / 2
    return marks + text(x, y, title, "middle", transform=f"rotate(-90 {number(x)} {number(y)})")


def document(name: str, title: str, description: str, height: float, *body: str) -> str:
    """A whole figure. Screen readers speak `title` and `description`; `name` makes their ids unique in a page."""
    return element(
        "svg",
        element("title", escape(title), id=f"{name}-title"),
        element("desc", escape(description), id=f"{name}-about"),
        element("style", STYLE),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        class_="figure",
        role="img",
        aria_labelledby=f"{name}-title {name}-about",
    )
