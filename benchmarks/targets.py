"""How fast we mean to be, on two cores, as ratios in one run; `report.py` says which targets are met."""

from typing import Any, NamedTuple

LOOP = ("one process per core",)


class Target(NamedTuple):
    """`systems` are those of one line of results/speed.json; of several, ours against the fastest counts."""

    section: str
    key: str
    systems: tuple[str, ...]
    bound: float
    kind: str = "speed"  # or memory; or share, of the machine's rate

    @property
    def what(self) -> str:
        workload = self.key.split()[-1]
        if self.kind == "share":
            return f"{workload}: share of the machine's large-matmul rate"
        whom = f"a plain loop, {self.systems[0]}" if self.systems == LOOP else self.systems[0].partition(",")[0]
        return f"{workload}: {self.kind} against {whom}{' at its best' if len(self.systems) > 1 else ''}"

    @property
    def wanted(self) -> str:
        return f"{'≤' if self.kind == 'memory' else '≥'} {self.bound:g}"

    def is_met(self, seen: float) -> bool:
        return seen <= self.bound if self.kind == "memory" else seen >= self.bound


FLOWER, PFL = ("Flower, one actor per core",), ("pfl, one process", "pfl, one process per core")
FEDJAX = ("fedjax", "fedjax, convolution as product")
TARGETS = [
    *(Target("loops", name, LOOP, bound) for name, bound in
      {"W1": 3, "W1b": 3, "W2": 5, "W3": 3.5, "W4": 1.5, "W4b": 2, "W5": 3}.items()),
    Target("loops", "W3", ("authors' way",), 10),
    *(Target("peers", f"pfl {name}", PFL, bound) for name, bound in
      {"W1": 3.5, "W1b": 3.5, "W4": 1.5, "W4b": 2, "W5": 3}.items()),
    *(Target("peers", f"flower {name}", FLOWER, bound) for name, bound in
      {"W1": 5, "W1b": 5, "W2": 50, "W4": 1.5, "W4b": 2, "W5": 3}.items()),
    *(Target("peers", f"fedjax {name}", FEDJAX, bound) for name, bound in {"W1": 5, "W1b": 5}.items()),
    Target("peers", "fedjax W2", FEDJAX[:1], 4),
    Target("loops", "W1", ("ours",), 0.4, "share"),
    *(Target("loops", name, LOOP, 1, "memory") for name in ("W1", "W1b", "W2", "W3", "W4", "W4b", "W5")),
]  # fmt: skip


def seen_for(target: Target, summary: dict[str, Any]) -> float | None:
    """What was measured; None where nothing was."""
    line = summary.get(target.section, {}).get(target.key, {})
    if "systems" not in line:
        return None
    if target.kind == "share":
        share: float = line["machine_rate"]["share_of_all_cores"]["median"]
        return share
    if target.kind == "memory":
        own, other = (line["systems"][name]["peak_pss_mb"] for name in ("ours", *target.systems))
        return float(own / other)
    return min(float(line["speed_of_ours"][name]["median"]) for name in target.systems)
