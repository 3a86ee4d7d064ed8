"""Names beside the points of a plot, none over another."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fedmoe.report import svg
from fedmoe.report.svg import Frame

TALL = 17.0
WIDEST = 170.0


def labels(points: Iterable[tuple[float, float, str]], taken: Sequence[Frame], frame: Frame) -> Iterator[str]:
    """Each name at the free place nearest to its point, with a thin line to it where that is not beside it."""
    taken = list(taken)
    for x, y, words in points:
        name = svg.shorten(words, WIDEST)
        box = free_place(x, y, svg.text_width(name), taken, frame)
        taken.append(box)
        end_x, end_y = min(max(x, box.left), box.right), (box.top + box.bottom) / 2
        if math.hypot(end_x - x, end_y - y) > 22:
            yield svg.line(x, y, end_x, end_y, class_="lead", stroke_dasharray="1 3")
        # A name beside its point starts there, since the estimate of its width is generous.
        middle = ("middle", (box.left + box.right) / 2)
        anchor, at = ("start", box.left) if box.left > x else ("end", box.right) if box.right < x else middle
        yield svg.text(at, box.bottom - 4, name, anchor, class_="label halo")


def free_place(x: float, y: float, width: float, taken: Sequence[Frame], frame: Frame) -> Frame:
    """The box for a label, inside `frame` and over nothing that is `taken`, as near to (x, y) as we find."""
    half = width / 2
    beside = [(x + 10 + half, y), (x - 10 - half, y), (x, y - 18), (x, y + 18)]
    columns = np.linspace(frame.left + half, frame.right - half, 25)
    rows = np.arange(frame.top + TALL / 2, frame.bottom - TALL / 2, TALL / 2)
    anywhere = sorted(
        ((float(cx), float(cy)) for cx in columns for cy in rows),
        key=lambda centre: math.hypot(max(0.0, abs(centre[0] - x) - half), centre[1] - y),
    )
    boxes = [Frame(cx - half, cy - TALL / 2, cx + half, cy + TALL / 2) for cx, cy in beside + anywhere]
    free = (box for box in boxes if within(box, frame) and not any(overlap(box, other) for other in taken))
    return next(free, boxes[0])


def overlap(a: Frame, b: Frame) -> bool:
    return a.left < b.right and b.left < a.right and a.top < b.bottom and b.top < a.bottom


def within(box: Frame, frame: Frame) -> bool:
    across = frame.left - 0.1 <= box.left and box.right <= frame.right + 0.1
    return across and frame.top <= box.top and box.bottom <= frame.bottom
