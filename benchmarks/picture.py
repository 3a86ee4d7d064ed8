"""The picture of docs/speed.md: how fast each system runs each workload, as a multiple of the plain loop per core."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedmoe.report import svg
from fedmoe.report.svg import Frame, Scale, element, line, text

ROW, GAP, TOP, LABELS = 19.0, 30.0, 12.0, 236.0
COLOURS = {"ours": "s0", "Flower": "s1", "pfl": "s2", "fedjax": "s3"}


class Bar(NamedTuple):
    system: str
    speed: float  # as a multiple of the plain loop in one process per core


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def speed_picture(groups: Sequence[Group]) -> str:
    """Bars from the middle line (the plain loop) to the right where faster, to the left where slower; log scale."""
    height = TOP + sum(GAP + ROW * len(group.bars) for group in groups)
    frame = Frame(LABELS + 14, TOP, svg.WIDTH - 50, height)
    exponents = [math.log10(bar.speed) for group in groups for bar in group.bars]
    low, high = min(-1.0, *exponents), max(1.0, *exponents)
    x = Scale(low, high, frame.left + 44, frame.right)  # room for the figure beside the longest bar
    body, y = axis(x, frame), TOP
    for group in groups:
        body += text(8, y + 16, svg.shorten(group.title, svg.WIDTH - 16), font_weight="bold", class_="halo")
        y += GAP - 6
        for bar in group.bars:
            body += drawn(bar, x, y)
            y += ROW
        y += 6
    words = "; ".join(f"{g.title}: " + ", ".join(f"{b.system} {times(b.speed)}" for b in g.bars) for g in groups)
    title = "Speed as a multiple of a plain PyTorch loop in one process per core"
    return svg.document("speed", title, words, height + 46, body)


def axis(x: Scale, frame: Frame) -> str:
    """Powers of ten, and the middle line."""
    marks = "".join(
        line(x(power), frame.top, x(power), frame.bottom, class_="lead" if power == 0 else "grid")
        + text(x(power), frame.bottom + 16, times(10.0**power), "middle", class_="soft")
        for power in range(math.ceil(x.low), math.floor(x.high) + 1)
    )
    words = "speed against a plain loop in one process per core"
    return marks + text((frame.left + frame.right) / 2, frame.bottom + 36, words, "middle")


def drawn(bar: Bar, x: Scale, top: float) -> str:
    end, middle = x(math.log10(bar.speed)), x(0)
    colour = next((colour for name, colour in COLOURS.items() if bar.system.startswith(name)), "s7")
    left, width = min(end, middle), max(1.5, abs(end - middle))
    beside = (end + 5, "start") if end >= middle else (end - 5, "end")
    return (
        text(LABELS, top + 12, svg.shorten(bar.system, LABELS), "end", font_size=12)
        + element("rect", x=left, y=top + 2, width=width, height=ROW - 6, fill="currentColor", class_=colour)
        + text(beside[0], top + 12, times(bar.speed), beside[1], font_size=12, class_="halo")
    )


def times(speed: float) -> str:
    """
    >>> times(12.3), times(3.14159), times(0.0234)
    ('12×', '3.1×', '0.023×')
    """
    return f"{speed:.0f}×" if speed >= 10 else f"{speed:.2g}×"
