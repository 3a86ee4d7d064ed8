"""Two figures of the experts of one run: who did the work, and what each is for. Empty where there is one expert."""

import math
from collections.abc import Sequence

import numpy as np

from fedmoe.evaluation.summary import RunRecord
from fedmoe.report import svg
from fedmoe.report.figures import MOST_ROWS, cells, thin
from fedmoe.report.svg import Frame, Scale, element, line, number, text


def expert_load(run: RunRecord, name: str) -> str:
    """Each expert's share of the work in every round, one line per expert."""
    observed = [(event["round"], event["experts"]["load"]) for event in run["history"] if event.get("experts")]
    if not observed or len(observed[0][1]) < 2:
        return ""
    num_experts, last = len(observed[0][1]), observed[-1]
    frame = Frame(68, 36, svg.WIDTH - 16, 260)
    x = Scale(observed[0][0], max(last[0], observed[0][0] + 1), frame.left, frame.right)
    y = Scale(0, max(1.5 / num_experts, *(load for _, loads in observed for load in loads)), frame.bottom, frame.top)
    return svg.document(
        name,
        "Work of each expert over rounds",
        "; ".join(f"expert {k}: {load:.0%} in round {last[0]}" for k, load in enumerate(last[1])),
        frame.bottom + 52,
        svg.x_axis(x, frame, "Round", whole=True),
        svg.y_axis(y, frame, "Share of the work", percent=True),
        line(frame.left, y(1 / num_experts), frame.right, y(1 / num_experts), class_="lead", stroke_dasharray="2 3"),
        *(_curve(k, [(round_, loads[k]) for round_, loads in observed], x, y) for k in range(num_experts)),
    )


def _curve(expert: int, loads: Sequence[tuple[int, float]], x: Scale, y: Scale) -> str:
    look = {"stroke_width": 2.0, "stroke_dasharray": svg.DASHES[expert // svg.NUM_COLOURS % len(svg.DASHES)]}
    points = " ".join(f"{number(x(round_))},{number(y(load))}" for round_, load in thin(loads))
    return element(
        "g",
        element("polyline", points=points, fill="none", stroke="currentColor", stroke_linejoin="round", **look),
        text(x.start + 44 * expert, 20, f"● {expert}", fill="currentColor") if expert < 13 else "",
        class_=f"s{expert % svg.NUM_COLOURS}",
    )


def assignment(run: RunRecord, name: str) -> str:
    """q(z|row): which expert serves which class (or angle, or client) at the end; the darker, the more."""
    known = run.get("assignment")
    if not known or len(known["shares"][0]) < 2:
        return ""
    shown = np.asarray(known["shares"][:MOST_ROWS], dtype=float)
    num_rows, num_experts = shown.shape
    tall, cell = min(20.0, max(7.0, 320 / num_rows)), min(48.0, (svg.WIDTH - 160) / num_experts)
    frame = Frame(136, 44, 136 + cell * num_experts, 44 + tall * num_rows)
    named = run["class_names"] if known["of"] == "label" and len(run["class_names"]) >= num_rows else range(num_rows)
    every_row, every_expert = max(1, math.ceil(16 / tall)), max(1, math.ceil(18 / cell))
    cut = f"Only the first {num_rows} rows are shown." if len(known["shares"]) > num_rows else ""
    return svg.document(
        name,
        f"Experts of each {known['of']}",
        f"{num_rows} rows, one for each {known['of']}, {num_experts} experts in columns. {cut}",
        frame.bottom + 30,
        element("rect", x=frame.left, y=frame.top, width=cell * num_experts, height=tall * num_rows, class_="panel"),
        *cells(shown, frame, cell, tall),
        *(
            text(frame.left + (k + 0.5) * cell, 38, k, "middle", class_="soft")
            for k in range(0, num_experts, every_expert)
        ),
        *(
            text(
                frame.left - 6, frame.top + (r + 0.5) * tall + 4, svg.shorten(str(named[r]), 100), "end", class_="soft"
            )
            for r in range(0, num_rows, every_row)
        ),
        text(frame.left, 18, "Expert"),
        text(frame.left, frame.bottom + 20, cut, class_="soft"),
    )
