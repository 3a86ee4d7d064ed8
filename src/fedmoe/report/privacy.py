"""What clients have spent of their privacy: a line for each method, and the clients one by one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedmoe.report.methods import Method, client_names

MOST_CLIENTS = 100  # in a table: those that have spent most
COLUMNS = ("Steps", "Sampling rate", "Noise multiplier", "Sensitivity", "Epsilon", "By RDP")

Spending = Mapping[str, Any]  # of one client, as results.json has it


class PrivacySection(NamedTuple):
    """Of methods that were trained with differential privacy. `left_out` clients have spent less than those shown."""

    lines: list[tuple[str, list[str]]]  # title, cells of SUMMARY
    clients: list[tuple[str, list[tuple[str, list[str]]], int]]  # title, (client, cells of COLUMNS), left out
    facts: list[str]


SUMMARY = ("Largest epsilon of a client", "At delta", "Steps", "Noise multiplier", "Noise", "Why nothing is guaranteed")


def privacy_section(methods: Sequence[Method]) -> PrivacySection | None:
    private = [(m, runs) for m in methods if (runs := [run for run in m.runs if run.get("privacy")])]
    if not private:
        return None
    lines, clients = [], []
    for method, runs in private:
        lines.append((method.title, _summary([run["privacy"] for run in runs])))
        first = runs[0]
        spent = sorted(first["privacy"]["clients"], key=lambda one: -one["epsilon"])
        if spent:
            names = client_names(first)
            shown = [(names.get(one["client"], str(one["client"])), _cells(one)) for one in spent[:MOST_CLIENTS]]
            seed = f", seed {first['seed']}" if len(runs) > 1 else ""
            clients.append((method.title + seed, shown, max(0, len(spent) - MOST_CLIENTS)))
    relations = dict.fromkeys(str(run["privacy"]["relation"]) for _, runs in private for run in runs)
    return PrivacySection(lines, clients, list(relations))


def _summary(spent: Sequence[Mapping[str, Any]]) -> list[str]:
    """Over the seeds of a method; where nothing is guaranteed the reason, and no number that could be taken for one."""
    everyone = [one for run in spent for one in run["clients"]]
    reasons = dict.fromkeys(run["no_guarantee"] for run in spent if run["no_guarantee"])
    sources = ", ".join(dict.fromkeys(run["noise_source"] for run in spent))
    if reasons or not everyone:
        return ["none", "–", "–", "–", sources, "; ".join(reasons) or "nothing was spent"]
    steps = [one["steps"] for one in everyone]
    return [
        f"{max(one['epsilon'] for one in everyone):.3f}",
        ", ".join(dict.fromkeys(f"{run['delta']:g}" for run in spent)),
        f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}",
        _numbers(value for one in everyone for value in one["noise_multiplier"]),
        sources,
        "–",
    ]


def _cells(one: Spending) -> list[str]:
    mechanism = [_numbers(one[name]) for name in ("sampling_rate", "noise_multiplier", "sensitivity")]
    return [str(one["steps"]), *mechanism, f"{one['epsilon']:.3f}", f"{one['rdp_epsilon']:.3f}"]


def _numbers(values: Any) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
