"""A live view of a run: reads its folder while another process trains, and needs no tensors."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedmoe.display.tables import duration
from fedmoe.errors import RunError
from fedmoe.report.runs import find_runs
from fedmoe.storage.rundir import RunDirectory

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
SECONDS_PER_LOOK = 1.0


def watch(folder: Path, console: Console, at_each: Callable[[], None], *, once: bool = False) -> None:
    """Until every run below the folder is finished, or the user has seen enough (Ctrl-C)."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        for shown, finished in looks(folder):
            live.update(shown)
            at_each()
            if finished or once:
                return


def looks(folder: Path) -> Iterator[tuple[RenderableType, bool]]:
    """What there is to see now, once a second, and whether it is the end."""
    while True:
        runs = find_runs(folder)
        if not runs:
            raise RunError(f"{folder} holds no run to watch (no config.toml). Name the folder of one, as --dir had it.")
        yield Group(*(panel(run) for run in runs)), all((run / "finished.json").exists() for run in runs)
        time.sleep(SECONDS_PER_LOOK)


def panel(folder: Path) -> Panel:
    run = RunDirectory(folder)
    config, events = run.read_config(), run.read_metrics()
    rounds = [event for event in events if event.get("event") == "round"]
    wanted = int(config["schedule"]["rounds"])
    table = Table.grid(padding=(0, 2))
    far = f"{len(rounds)} of {wanted}{_left(rounds, wanted)}"
    table.add_row("rounds", ProgressBar(wanted, len(rounds), width=WIDTH), far)
    for name in dict.fromkeys(key for event in rounds[-50:] for key in event["reports"]):
        values = [event["reports"][name] for event in rounds if event["reports"].get(name) is not None]
        table.add_row(escape(name.replace("_", " ")), sparkline(values), f"{values[-1]:.4g}")
    curve = [event for event in events if event.get("event") == "curve"]
    for kind in ("own", "global", "unseen", "pooled"):
        values = [event[kind] for event in curve if event.get(kind) is not None]
        if values:
            table.add_row(f"score, {kind}", sparkline(values), f"{values[-1]:.4g}")
    if rounds and len(load := rounds[-1].get("experts", {}).get("load", [])) > 1:
        table.add_row("experts", "", " / ".join(f"{share:.0%}" for share in load))
    scored = len({event["client"] for event in events if event.get("event") == "score"})
    state = "finished" if (folder / "finished.json").exists() else "scoring" if scored else "training"
    warned = [f"round {e['round']}: {words}" for e in rounds for words in e.get("warnings", ())]
    for words in warned[-3:]:
        table.add_row("[yellow]warning[/yellow]", "", f"[yellow]{escape(words)}[/yellow]")
    algorithm = config["algorithm"]
    title = f"{algorithm.get('label') or algorithm['name']}, seed {config['seed']}: {state}"
    return Panel(table, title=escape(title), subtitle=escape(str(folder)))


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """
    >>> sparkline([0, 1, 2, 3], 4), sparkline([5, 5]), sparkline([])
    ('▁▃▅█', '▄▄', '')
    """
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    chosen = [values[min(len(values) - 1, int((i + 1) * step) - 1)] for i in range(min(width, len(values)))]
    low, high = min(chosen), max(chosen)
    if high == low:
        return BARS[3] * len(chosen)
    return "".join(BARS[int((value - low) / (high - low) * (len(BARS) - 1))] for value in chosen)


def _left(rounds: Sequence[dict[str, Any]], wanted: int) -> str:
    recent = [event["seconds"] for event in rounds[-20:]]
    if not recent or len(rounds) >= wanted:
        return ""
    return f", about {duration(sum(recent) / len(recent) * (wanted - len(rounds)))} of rounds left"
