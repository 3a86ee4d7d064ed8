"""Pictures of results/ and docs/, drawn with matplotlib from stored runs; the same bytes from the same runs."""

import io
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from fedmoe.evaluation.answers import with_headline
from fedmoe.report import figures

COLOURS = ("#0067a8", "#c2500a", "#00805c", "#a03a86", "#8a6900", "#5b4fc4", "#b3263a", "#4d5b69")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
SYSTEMS = {"ours": COLOURS[0], "Flower": COLOURS[1], "pfl": COLOURS[2], "fedjax": COLOURS[3]}
STYLE = {
    "svg.hashsalt": "fedmoe",  # ids that do not change from one drawing to the next
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dfe3e8",
    "figure.constrained_layout.use": True,
}  # fmt: skip

Run = dict[str, Any]


class Bar(NamedTuple):
    system: str
    speed: float  # as a multiple of the plain loop in one process per core


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def written(drawing: Figure) -> str:
    """As SVG, without the date."""
    file = io.StringIO()
    drawing.savefig(file, format="svg", metadata={"Date": None})
    plt.close(drawing)
    return file.getvalue()


def trade_off(runs: Sequence[Run]) -> str:
    """What each method buys (own accuracy) and costs (global accuracy), with 95% intervals over seeds.

    Of each method its own answer, not those with other label frequencies.
    """
    found = figures.trade_off([with_headline(run) for run in runs])
    assert found, "these runs have no scores"
    with plt.rc_context(STYLE):
        drawing, axes = plt.subplots(figsize=(6.4, 4.2))
        for point in found.data["points"]:
            x, y, x_half, y_half = (100 * point[key] for key in ("x", "y", "x_half", "y_half"))
            turn, place = divmod(point["place"], len(COLOURS))
            look = {"fmt": MARKERS[turn], "color": COLOURS[place], "markersize": 8}
            axes.errorbar(x, y, y_half or None, x_half or None, label=point["name"], **look)
        axes.legend(frameon=False)
        axes.set(xlabel="Accuracy on the balanced global test, %", ylabel="Accuracy on clients' own test data, %")
        return written(drawing)


def learning_curve(runs: Sequence[Run], kind: str, axis: str) -> str:
    """One line per method, mean over seeds; `axis` is "round" or "bytes"."""
    with plt.rc_context(STYLE):
        drawing, axes = plt.subplots(figsize=(6.4, 4.2))
        for method in figures.group(runs):
            if points := figures.curve_of(method, kind, axis):
                x, y = zip(*points, strict=True)
                look = {"color": COLOURS[method.place % len(COLOURS)], "linestyle": DASHES[method.place % len(DASHES)]}
                axes.plot(x, [100 * value for value in y], label=method.title, **look)
        axes.legend(frameon=False)
        axes.set(xlabel=figures.AXES[axis], ylabel=f"Accuracy on {figures.CURVES[kind]}, %")
        return written(drawing)


def gradient_norms(runs: Sequence[Run]) -> str:
    """The mean norm of the gradients that users sent, round by round, mean over seeds (Peterson et al., Figure 7)."""
    with plt.rc_context(STYLE):
        drawing, axes = plt.subplots(figsize=(6.4, 4.2))
        for place, method in enumerate(figures.group([run for run in runs if "gradient_norms" in run])):
            rounds = zip(*(run["gradient_norms"] for run in method.runs), strict=True)
            look = {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}
            axes.plot([fmean(norms) for norms in rounds], label=method.title, **look)
        axes.legend(frameon=False)
        axes.set(xlabel="round", ylabel="norm of the gradients sent", yscale="log")
        return written(drawing)


def gates(runs: Sequence[Run]) -> str:
    """The users' records, and the gates of both users over the plane (Peterson et al., Figure 4)."""
    from fedmoe.data.synthetic import DEVIATIONS, MEANS

    shown = [run for run in runs if "gates" in run and run["seed"] == min(one["seed"] for one in runs)]
    x, y = np.meshgrid(np.linspace(-6, 6, 61), np.linspace(-6, 6, 61))
    with plt.rc_context({**STYLE, "axes.grid": False}):
        drawing, grid = plt.subplots(len(shown), 2, figsize=(7.2, 3.4 * len(shown)), squeeze=False)
        for run, row in zip(shown, grid, strict=True):
            for user, axes in enumerate(row):
                first, second, bias = run["gates"][user]
                alpha = 1 / (1 + np.exp(-np.clip(first * x + second * y + bias, -50, 50)))
                filled = axes.contourf(x, y, alpha, levels=np.linspace(0, 1, 11), cmap="gray")
                for other, (mean, deviation) in enumerate(zip(MEANS, DEVIATIONS, strict=True)):
                    place = {"xy": mean, "width": 4 * deviation[0], "height": 4 * deviation[1]}
                    axes.add_patch(Ellipse(**place, fill=False, color=COLOURS[other], label=f"user {other + 1}"))
                axes.set(title=f"{run['title']}: gate of user {user + 1}", xlabel="x", ylabel="y", aspect="equal")
        grid[0, 0].legend(frameon=True)
        drawing.colorbar(filled, ax=grid.ravel().tolist(), label="share of the general model, α(x, y)")
        return written(drawing)


def speed_picture(groups: Sequence[Group]) -> str:
    """Bars from the middle line (the plain loop) to the right where faster, to the left where slower; log scale."""
    bars = [(group.title, bar) for group in groups for bar in group.bars]
    with plt.rc_context(STYLE):
        layout = {"figsize": (7.2, 0.6 + 0.34 * len(bars)), "height_ratios": [len(group.bars) for group in groups]}
        drawing, axes = plt.subplots(len(groups), 1, sharex=True, squeeze=False, **layout)
        for group, place in zip(groups, axes[:, 0], strict=True):
            draw_group(group, place)
        low, high = min(0.1, *(bar.speed for _, bar in bars)), max(10, *(bar.speed for _, bar in bars))
        axes[-1, 0].set(xscale="log", xlim=(low / 2.5, 2.5 * high))
        axes[-1, 0].set_xlabel("speed against a plain loop in one process per core")
        return written(drawing)


def draw_group(group: Group, axes: Axes) -> None:
    names = [bar.system for bar in group.bars]
    colours = [next((SYSTEMS[name] for name in SYSTEMS if system.startswith(name)), COLOURS[7]) for system in names]
    drawn = axes.barh(names, [bar.speed - 1 for bar in group.bars], left=1, color=colours)
    axes.set_title(group.title, loc="left", fontsize=10, fontweight="bold")
    axes.axvline(1, color="#566270", linewidth=1)
    axes.invert_yaxis()
    for bar, shape in zip(group.bars, drawn, strict=True):
        side = "left" if bar.speed >= 1 else "right"
        at = (bar.speed * (1.08 if bar.speed >= 1 else 0.92), shape.get_y() + shape.get_height() / 2)
        axes.text(*at, times(bar.speed), ha=side, va="center", fontsize=9)


def times(speed: float) -> str:
    """
    >>> times(12.3), times(3.14159), times(0.0234)
    ('12×', '3.1×', '0.023×')
    """
    return f"{speed:.0f}×" if speed >= 10 else f"{speed:.2g}×"


PICTURES = {
    "trade_off": trade_off,
    "gradient_norms": gradient_norms,
    "gates": gates,
    "own_by_round": partial(learning_curve, kind="own", axis="round"),
    "own_by_bytes": partial(learning_curve, kind="own", axis="bytes"),
    "pooled_by_round": partial(learning_curve, kind="pooled", axis="round"),
    "pooled_by_bytes": partial(learning_curve, kind="pooled", axis="bytes"),
}
