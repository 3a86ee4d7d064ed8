"""Four figures of one comparison, each an SVG string; empty where there is nothing to show."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedmoe.evaluation.figure_of_merit import FigureOfMerit, figure_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report import svg
from fedmoe.report.labels import labels
from fedmoe.report.methods import Method, Row, group, own_scores, training_losses
from fedmoe.report.svg import Frame, Scale, element, line, number, text

MOST_POINTS = 300
MOST_ROWS = 60
LEVELS = 10
DOT = 5.0  # diameter
ROW = 56.0


class Point(NamedTuple):
    """Where a method stands, in pixels; the ends are those of its 95 % interval, or the point itself."""

    place: int
    title: str
    words: str
    x: float
    y: float
    ends: Frame


def trade_off(results: Sequence[RunRecord]) -> str:
    """What each method buys (its score on a client's own data) and costs (its score on everyone's data)."""
    figure = figure_of(results)
    rows = [(i, row) for i, row in enumerate(summarise(results)) if row["own"] and row["global"]]
    if not rows:
        return ""
    frame = Frame(68, 12, svg.WIDTH - 16, max(372.0, 30.0 * len(rows)))
    ends = {part: _ends((row[part] for _, row in rows), figure) for part in ("own", "global")}
    x = Scale(*svg.domain(ends["global"], 0.04, figure.limits), frame.left, frame.right)
    y = Scale(*svg.domain(ends["own"], 0.04, figure.limits), frame.bottom, frame.top)
    points = [_point(i, row, x, y, figure) for i, row in rows]
    return svg.document(
        "trade-off",
        f"{figure.name} on own data against that on everyone's data",
        "; ".join(point.words for point in points),
        frame.bottom + 52,
        svg.x_axis(
            x, frame, f"{figure.name} on the {'balanced ' * figure.percent}global test →", percent=figure.percent
        ),
        svg.y_axis(y, frame, f"{figure.name} on clients' own test data →", percent=figure.percent),
        *(_cross(point) for point, (_, row) in zip(points, rows, strict=True) if row["seeds"] > 1),
        *labels([(p.x, p.y, p.title) for p in points], [box for p in points for box in _obstacles(p)], frame),
        *(_marker(point) for point in points),
    )


def _ends(cells: Iterable[Row], figure: FigureOfMerit) -> list[float]:
    """Both ends of every interval, as far as the figure of merit can go."""
    low, high = figure.limits
    pairs = [(cell["mean"], cell["interval"] or 0.0) for cell in cells]
    return [min(high, max(low, mean + side * half)) for mean, half in pairs for side in (-1, 1)]


def _point(place: int, row: Row, x: Scale, y: Scale, figure: FigureOfMerit) -> Point:
    left, right = (x(value) for value in _ends([row["global"]], figure))
    bottom, top = (y(value) for value in _ends([row["own"]], figure))
    own, everyone = (figure.with_unit(row[part]["mean"]) for part in ("own", "global"))
    words = f"{row['title']}: own {own}, global {everyone}"
    middle = x(row["global"]["mean"]), y(row["own"]["mean"])
    return Point(place, row["title"], words, *middle, Frame(left, top, right, bottom))


def _colour(place: int) -> str:
    return f"s{place % svg.NUM_COLOURS}"


def _marker(p: Point) -> str:
    look = {"r": 6.0, "fill": "currentColor", "class_": f"point halo {_colour(p.place)}"}
    return element("circle", element("title", svg.escape(p.words)), cx=p.x, cy=p.y, **look)


def _cross(p: Point) -> str:
    arms = line(p.ends.left, p.y, p.ends.right, p.y) + line(p.x, p.ends.bottom, p.x, p.ends.top)
    return element("g", arms, class_=f"interval {_colour(p.place)}", stroke="currentColor", stroke_width=1.5)


def _obstacles(p: Point) -> list[Frame]:
    """Where a name must not stand: the marker and its cross."""
    across = Frame(p.ends.left, p.y - 1, p.ends.right, p.y + 1)
    return [Frame(p.x - 7, p.y - 7, p.x + 7, p.y + 7), across, Frame(p.x - 1, p.ends.top, p.x + 1, p.ends.bottom)]


def training_curve(results: Sequence[RunRecord]) -> str:
    """Training loss of each round; methods with the same rounds are one line."""
    shared: dict[tuple[tuple[int, float], ...], list[Method]] = {}
    for method in group(results):
        if losses := training_losses(method):
            shared.setdefault(tuple(losses.items()), []).append(method)
    if not shared:
        return ""
    names = [", ".join(method.title for method in methods) for methods in shared.values()]
    frame = Frame(68, 20.0 + 22 * len(shared), svg.WIDTH - 16, 300.0 + 22 * len(shared))
    rounds, values = zip(*(pair for losses in shared for pair in losses), strict=True)
    x = Scale(min(rounds), max(max(rounds), min(rounds) + 1), frame.left, frame.right)
    y = Scale(*svg.domain(values, max(1e-6, 1e-3 * max(map(abs, values)))), frame.bottom, frame.top)
    return svg.document(
        "training-curve",
        "Training loss of each round",
        "; ".join(f"{name}: from {c[0][1]:.3g} to {c[-1][1]:.3g}" for name, c in zip(names, shared, strict=True)),
        frame.bottom + 52,
        svg.x_axis(x, frame, "Round", whole=True),
        svg.y_axis(y, frame, "Training loss"),
        *(curve(i, losses, methods[0], names[i], x, y) for i, (losses, methods) in enumerate(shared.items())),
    )


def curve(place: int, points: Sequence[tuple[float, float]], method: Method, name: str, x: Scale, y: Scale) -> str:
    """A line in the method's colour, and its name above the frame."""
    look = {"stroke": "currentColor", "stroke_width": 2.0, "stroke_dasharray": svg.DASHES[place % len(svg.DASHES)]}
    path = " ".join(f"{number(x(across))},{number(y(up))}" for across, up in thin(points))
    top = 16.0 + 22 * place
    return element(
        "g",
        element("polyline", points=path, fill="none", stroke_linejoin="round", stroke_linecap="round", **look),
        line(x.start, top - 4, x.start + 28, top - 4, **look),
        text(x.start + 36, top, svg.shorten(name, svg.WIDTH - x.start - 40)),
        class_=_colour(method.place),
    )


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` of the points, evenly chosen, the first and the last among them."""
    chosen = np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int)
    return [points[i] for i in chosen]


def class_counts(
    counts: Sequence[Sequence[int]], class_names: Sequence[str], client_names: Mapping[int, str] | None = None
) -> str:
    """Training examples of each client (row) and class (column); the darker, the more.

    Clients that have no name are shown as numbers.
    """
    shown = np.asarray(counts[:MOST_ROWS], dtype=float)
    if shown.size == 0:
        return ""
    num_rows, num_classes = shown.shape
    slanted = max(map(svg.text_width, class_names), default=0) > (svg.WIDTH - 80) / num_classes
    top, right = (96.0, svg.WIDTH - 56) if slanted else (60.0, svg.WIDTH - 16)
    tall = min(20.0, max(7.0, 320 / num_rows))
    named = client_names or {}
    clients = [svg.shorten(named.get(client, str(client)), 96) for client in range(num_rows)]
    left = max(64.0, 30 + max(map(svg.text_width, clients)))
    frame = Frame(left, top, right, top + tall * num_rows)
    cell = (frame.right - frame.left) / num_classes
    cut = f"Only the first {num_rows} clients are shown." if len(counts) > num_rows else ""
    return svg.document(
        "class-counts",
        "Training examples of each client and class",
        f"{num_rows} clients in rows, {num_classes} classes in columns, up to {shown.max():.0f} examples. {cut}",
        frame.bottom + 30,
        element("rect", x=frame.left, y=frame.top, width=cell * num_classes, height=tall * num_rows, class_="panel"),
        *cells(shown, frame, cell, tall),
        *_class_names(class_names, frame, cell, slanted),
        *_clients(clients, frame, tall),
        _colour_key(frame, float(shown.max())),
        text(frame.left, frame.bottom + 20, cut, class_="soft"),
    )


def cells(shown: NDArray[np.float64], frame: Frame, cell: float, tall: float) -> Iterator[str]:
    """One path for each level of colour, so that many cells stay a small file."""
    levels = np.ceil(LEVELS * shown / max(1.0, shown.max())).astype(int)
    gap = 1.0 if min(cell, tall) > 5 else 0.0
    box = f"h{number(cell - gap)}v{number(tall - gap)}h{number(gap - cell)}z"
    for level in range(1, LEVELS + 1):
        corners = [(frame.left + k * cell, frame.top + c * tall) for c, k in np.argwhere(levels == level)]
        if corners:
            path = "".join(f"M{number(left)} {number(top)}{box}" for left, top in corners)
            yield element("path", d=path, class_="cells s0", fill="currentColor", fill_opacity=level / LEVELS)


def _class_names(names: Sequence[str], frame: Frame, cell: float, slanted: bool) -> Iterator[str]:
    """As many names as there is room for."""
    for k in range(0, len(names), max(1, math.ceil(18 / cell))):
        x, y = frame.left + (k + 0.5) * cell, frame.top - 6
        turn = {"transform": f"rotate(-45 {number(x)} {number(y)})"} if slanted else {}
        name = svg.shorten(names[k], 80) if slanted else names[k]
        yield text(x, y, name, "start" if slanted else "middle", class_="soft", **turn)


def _clients(names: Sequence[str], frame: Frame, tall: float) -> Iterator[str]:
    for row in range(0, len(names), max(1, math.ceil(16 / tall))):
        yield text(frame.left - 6, frame.top + (row + 0.5) * tall + 4, names[row], "end", class_="soft")
    x, y = 14.0, frame.top + len(names) * tall / 2
    yield text(x, y, "Client", "middle", transform=f"rotate(-90 {number(x)} {number(y)})")


def _colour_key(frame: Frame, most: float) -> str:
    steps = "".join(
        element("rect", x=frame.left + 16 + 14 * i, y=6.0, width=13.0, height=12.0, fill_opacity=i / LEVELS)
        for i in range(1, LEVELS + 1)
    )
    words = f"{most:.0f} training examples of a class"
    end = text(frame.left + 36 + 14 * LEVELS, 16, words, class_="soft")
    return text(frame.left, 16, "0", class_="soft") + element("g", steps, class_="s0", fill="currentColor") + end


def per_client(results: Sequence[RunRecord]) -> str:
    """Every client on its own data: one dot per client and seed, a diamond at the mean of a method."""
    figure = figure_of(results)
    rows = [(m, pooled) for m in group(results) if (pooled := own_scores(m))]
    if not rows:
        return ""
    names = min(200.0, max(svg.text_width(method.title) for method, _ in rows))
    frame = Frame(24 + names, 24, svg.WIDTH - 64, 24 + ROW * len(rows))
    x = Scale(*svg.domain((a for _, pooled in rows for a in pooled), 0.04, figure.limits), frame.left, frame.right)
    shown = figure.with_unit
    return svg.document(
        "per-client",
        f"{figure.name} of each client on its own test data",
        "; ".join(f"{m.title}: {shown(min(p))} to {shown(max(p))}, mean {shown(fmean(p))}" for m, p in rows),
        frame.bottom + 52,
        svg.x_axis(x, frame, f"{figure.name} on the client's own test data →", percent=figure.percent),
        text(svg.WIDTH - 8, 14, "Mean", "end", class_="soft"),
        *(_strip(method, pooled, x, frame.top + (i + 0.5) * ROW, figure) for i, (method, pooled) in enumerate(rows)),
    )


def _strip(method: Method, pooled: Sequence[float], x: Scale, middle: float, figure: FigureOfMerit) -> str:
    """Dots that would cover one another are stacked: where many clients are, the strip is thick."""
    stacks = Counter(round(x(score) / DOT) for score in pooled)
    gap = min(DOT, (ROW - 12) / max(stacks.values()))
    dots = "".join(
        f"M{number(DOT * column)} {number(middle + gap * (i - (height - 1) / 2))}h0"
        for column, height in sorted(stacks.items())
        for i in range(height)
    )
    mean = x(fmean(pooled))
    diamond = f"M{number(mean)} {number(middle - 9)}l6 9l-6 9l-6 -9z"
    return element(
        "g",
        text(8, middle + 4, svg.shorten(method.title, x.start - 23.9)),
        element("path", d=dots, stroke="currentColor", stroke_width=DOT - 0.6, stroke_linecap="round", class_="dots"),
        element("path", d=diamond, class_="mean halo"),
        text(svg.WIDTH - 8, middle + 4, figure.with_unit(fmean(pooled)), "end"),
        class_=_colour(method.place),
    )
