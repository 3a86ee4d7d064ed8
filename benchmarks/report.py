"""Write docs/speed.md and docs/speed.svg from results/speed.json.

python benchmarks/report.py
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

from picture import Bar, Group, speed_picture
from record import read_summary
from targets import TARGETS, seen_for
from turns import Line
from workloads import TITLES

DOCS = Path(__file__).parent.parent / "docs"
PER_CORE = "one process per core"
PEERS = ("flower", "pfl", "fedjax")

HOW = """\
Every system is a process of its own and trains the same tensors, made from the same seeds, for the same number of
optimizer steps. Systems take turns, one at work at a time, in alternating order, after warming up; a turn gives one
ratio against ours. Cells are the **median of the ratios (lowest to highest)**: above 1, ours is faster; within 1.2
of 1 is no difference. Start-up and compilation are left out. The plain loop is what a careful user writes: data in
memory, fused optimizers, one thread per process, validation in one batch; in W3 its frozen model answers for each batch
anew. *Authors' way* is W3 as the published script does it: validation in every epoch, one image at a time, default
Adam, one process. The texts of W5 are drawn with the lengths and the word frequencies of AG News, of which too few rows
are at hand for a thousand clients; its plain loop runs two LSTMs over padded texts, which PyTorch computes three times
faster than one over packed ones. Flower's clients run the plain loop's training; pfl and fedjax bring their own. Memory
is the peak of all processes of a system, shared pages counted once (PSS)."""

LIMITS = """\
`python benchmarks/profile_round.py W2` (AMD EPYC, 2026-11-16): of a round of 3.1 ms the kernels take 0.7; the trainer
around them 0.7, gathering the examples of ten clients 0.3, messages 0.5 (encoding, decoding, frames, checks), the
average 0.2, and the rest 0.8 goes to bookkeeping. So logistic regression on sixty rows is bound by the engine, not by
arithmetic: a client's training costs less than a message to it. That is why light models are one cohort in one process:
split over two workers the same round took 3.4 to 6.4 ms, against 2.8 to 4.0 in turns with it. At this size a busy
neighbour shows: medians of six measurements of W2 against one process per core, in one hour, went from 4.5 to 5.6.

W1 spends four fifths of its time in the kernels. Its five clients leave one of two cores idle for a third of the time,
so at most 83% of the machine can be used; W1b, with fifty, has no such gap.

W4 and W4b are bound by their 3x3 convolutions (Intel Xeon with AVX-512, 2026-11-18, processor time of one core, a
batch of twenty, while other work ran on both). `torch.profiler` gives convolutions 73% of a step of PyTorch, GroupNorm
7%, ReLU 9%, additions and copies 5%. Best of sixty (oneDNN: of thirty), in milliseconds, forward and both gradients
together; oneDNN is what PyTorch calls:

| 3x3 convolution | oneDNN | as matrix products | Winograd F(2x2, 3x3) |
| --- | --- | --- | --- |
| 16 channels, 32x32 | 0.97 and 2.27 | 1.24 and 2.63 | **0.56 and 1.38** |
| 32 channels, 16x16 | 0.91 and 2.00 | 0.84 and 1.91 | **0.46 and 1.03** |
| 64 channels, 8x8 | 0.66 and 1.41 | 0.95 and 1.84 | **0.42 and 0.87** |
| 16 to 32 channels, stride 2 | 0.64 and 1.65 | **0.62 and 1.20** | – |
| 32 to 64 channels, stride 2 | 0.48 and 1.42 | **0.54 and 0.98** | – |

So stride 1 goes by Winograd wherever channels fill vectors, all else by products of packed windows. A first version of
the products, with blocks of pixels read in place at a stride that is known at run time, took 0.42 and 1.52 ms for 16
to 32 channels: its forward pass was faster, its backward pass slower. What made Winograd fast: buffers that start at a
cache line (0.44 to 0.35 ms for 32 channels), points of a tile that are no power of two apart (else they share cache
lines), and a layout in which a tile is a constant away from the next (0.59 to 0.47 ms for 16 channels). F(4x4, 3x3),
which has fewer products still and rounds worse, was not tried. GroupNorm, the shortcut and ReLU are one pass, and run
right behind their convolution on the few examples that are still in the cache: 3% of a step.

W4, W4b and W5 were measured on an idle AMD EPYC with AVX-512; a busy Intel Xeon had given 1.65, 2.01 and 3.60. Of five
pairs of clients one of two workers gets three: with one client per message W4 went from 1.70 to 2.00. A worker of W4b
is in the kernels for 98% of its time (`perf record`): Winograd 50%, products of packed windows 32%, GroupNorm 10%. The
first layer, strides and shortcuts, which Winograd does not serve, are a larger part of ResNet-8 than of ResNet-20.
Tuned for AMD, GCC multiplies and adds in two instructions where one sum waits for the other. It is told not to, for
the same bits in every batch, which costs W4b 3% and W4 2% (in turns).

W5, the same way: products of matrices 48%, the steps of the recurrence 14%, Adam 8% (it visits the 1,500 rows of the
embedding that a client's words name, of 10,000; 12% before its correction moved into the rate, one division less for
each weight), the rest of the LSTM 8%, copying and zeroing memory 5%. The coordinator takes 9% of a core: it sends each
client 4.4 MB, checks and averages what comes back. Of some 600 MB of memory 218 are the fifty updates of a round, which
an algorithm's `aggregate` is given together; the plain loop adds them up one by one. Tried, and slower or no faster:
columns of the left matrix in blocks that stay in the nearest cache (7% slower), loops of 512 bits where the compiler
prefers 256 (the same)."""


def page(summary: Line) -> str:
    loops, peers = summary.get("loops", {}), summary.get("peers", {})
    parts = [
        "# Speed",
        "*Written by `benchmarks/report.py` from [`results/speed.json`](../results/speed.json): do not edit. "
        "`make bench` and `make bench-peers` measure again.*",
        "![Speed of each system as a multiple of a plain loop in one process per core](speed.svg)",
        "## How it was measured",
        HOW,
        "\n".join(circumstances({**{f"loops {name}": line for name, line in loops.items()}, **peers})),
        "## Against plain PyTorch loops",
        table(["workload", "ours", "against one process", f"against {PER_CORE}", "against the authors' way"],
              loop_rows(loops)),
        "## Against other frameworks",
        table(["system", *TITLES], peer_rows(peers)),
        *(f"- {key}: `{line['error'].strip().splitlines()[-1]}`" for key, line in peers.items() if "error" in line),
        "## Against the machine",
        table(["workload", "large matmul, one process", "large matmul, all cores", "ours", "share"], rate_rows(loops)),
        "Rates in GFLOP/s; ours in dense-equivalent operations (two per multiply-add of a plain convolution, the "
        "backward pass counted as twice the forward), so work that is skipped because it cannot matter, or that "
        "Winograd saves, counts as done.",
        "## Memory",
        table(["workload, peak in MB", "ours", "one process", PER_CORE], memory_rows(loops)),
        "## Targets",
        table(["what", "wanted", "seen", "met"], target_rows(summary)),
        "## What limits it",
        LIMITS,
        *other_parts(summary),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def circumstances(lines: dict[str, Line]) -> Iterator[str]:
    named = {name: line for name, line in lines.items() if "systems" in line}
    measured = list(named.values())
    if not measured:
        return
    versions = {
        f"{package} {system[package]}"
        for line in measured
        for system in line["systems"].values()
        for package in ("fedmoe", "python", "torch", "flwr", "ray", "pfl", "fedjax", "jax")
        if package in system
    }
    others = [line["cores_busy_with_others"] for line in measured]
    dates = sorted(line["measured"] for line in measured)
    turns = sorted({len(line["systems"]["ours"]["seconds"]) for line in measured})
    for cpu in sorted({line["cpu"] for line in measured}):
        here = [name for name, line in named.items() if line["cpu"] == cpu]
        yield f"- on {measured[0]['cores']} cores of {cpu}: {', '.join(here)}"
    yield f"- versions: {', '.join(sorted(versions))}"
    yield f"- measured {dates[0]} to {dates[-1]} UTC, {' or '.join(map(str, turns))} turns each"
    yield f"- cores that were busy with other work meanwhile, on average: {min(others)} to {max(others)}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else ""


def spread(ratio: Line | None) -> str:
    return "–" if ratio is None else f"**{ratio['median']:.2f}** ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"


def loop_rows(loops: Line) -> list[list[str]]:
    rows = []
    for name, line in in_order(loops):
        own, speed = line["systems"]["ours"], line["speed_of_ours"]
        rate = own["rounds"] / statistics.median(own["seconds"])
        ratios = [spread(speed.get(system)) for system in ("one process", PER_CORE, "authors' way")]
        rows.append([f"{name}: {TITLES[name]}", f"{rate:.3g} rounds/s, {own['backend']}", *ratios])
    return rows


def peer_rows(peers: Line) -> list[list[str]]:
    cells: dict[str, dict[str, str]] = {}
    for key, line in peers.items():
        for system, ratio in line.get("speed_of_ours", {}).items():
            if system != PER_CORE:
                cells.setdefault(system, {})[key.split()[-1]] = spread(ratio)
    return [[f"against {system}", *(row.get(name, "–") for name in TITLES)] for system, row in sorted(cells.items())]


def rate_rows(loops: Line) -> list[list[str]]:
    return [
        [name]
        + [f"{rate[key]['median']:.1f}" for key in ("gflops_one_process", "gflops_all_cores", "gflops_ours")]
        + [f"{rate['share_of_all_cores']['median']:.1%}"]
        for name, line in in_order(loops)
        if (rate := line.get("machine_rate"))
    ]


def memory_rows(loops: Line) -> list[list[str]]:
    return [
        [name, *(str(line["systems"][system]["peak_pss_mb"]) for system in ("ours", "one process", PER_CORE))]
        for name, line in in_order(loops)
    ]


def target_rows(summary: Line) -> list[list[str]]:
    rows = []
    for target in TARGETS:
        seen = seen_for(target, summary)
        met = "not measured" if seen is None else "yes" if target.is_met(seen) else "no"
        rows.append([target.what, target.wanted, "–" if seen is None else f"{seen:.2f}", met])
    return rows


def other_parts(summary: Line) -> list[str]:
    population = sorted(summary.get("population", {}).values(), key=lambda line: line["clients"])
    columns = ("clients", "ms_per_round", "ms_private_state", "peak_memory_mb")
    parts = []
    if population:
        parts += [
            "## Population",
            "100 clients sampled per round, FedAvg, a small MLP, a checkpoint each round, one worker; private state: "
            "reading and writing the states of the 100 sampled clients while every client has one.",
            table(
                ["clients", "ms per round", "ms private state", "peak memory, MB"],
                [[f"{line[column]:,}" for column in columns] for line in population],
            ),
        ]
    for line in summary.get("methods", {}).values():
        parts += [
            "## What methods cost",
            f"A round of each method as a multiple of FedAvg's, in turns within one process: {line['what']}. Bytes are "
            "those that a client receives and sends in a round.",
            table(
                ["method", "time", "bytes", "step by step in the native backend"],
                [
                    [name, spread(method["time"]), f"{method['bytes']:.2f}", "; ".join(method["fallbacks"]) or "–"]
                    for name, method in line["methods"].items()
                ],
            ),
        ]
    for line in summary.get("overheads", {}).values():
        parts += [
            "## Overheads",
            f"Starting Python takes {line['start_python_s']} s, importing torch {line['import_torch_s']} s, the "
            f"command line {line['import_fedmoe_s']} s; a checkpoint of the small CNN (fsynced) "
            f"{line['checkpoint_of_small_cnn_ms']} ms.",
        ]
    return parts


def groups(summary: Line) -> list[Group]:
    """Bars of each workload: ours and the loops from one run, each peer from the run beside it."""
    found = []
    for name, line in in_order(summary.get("loops", {})):
        bars = bars_of(line, [s for s in line["systems"] if s != PER_CORE and not s.startswith("matmul")])
        for peer in PEERS:
            beside = summary.get("peers", {}).get(f"{peer} {name}", {})
            bars += bars_of(beside, [s for s in beside.get("systems", {}) if s not in ("ours", PER_CORE)])
        found.append(Group(f"{name}: {TITLES[name]}", bars))
    return found


def bars_of(line: Line, systems: list[str]) -> list[Bar]:
    def median_of(system: str) -> float:
        plain, own = line["systems"][PER_CORE]["seconds"], line["systems"][system]["seconds"]
        return statistics.median(a / b for a, b in zip(plain, own, strict=True))

    return [
        Bar(f"plain loop, {system}" if system.startswith("one") else system, median_of(system)) for system in systems
    ]


def in_order(loops: Line) -> list[tuple[str, Line]]:
    return [(name, loops[name]) for name in TITLES if name in loops]


def main() -> None:
    summary = read_summary()
    (DOCS / "speed.md").write_text(page(summary))
    (DOCS / "speed.svg").write_text(speed_picture(groups(summary)) + "\n")


if __name__ == "__main__":
    main()
