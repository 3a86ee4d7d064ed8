"""What was tried for FedJETs, and what validation clients made of it: unseen, unlabelled, none of which tests."""

from pathlib import Path

from stored_runs import Run, load

from fedmoe.report.expert_figures import ACCURACY_OF


def tuning(folder: Path, pattern: str) -> list[list[str]]:
    """A line for each run; accuracy of validation clients in percent."""
    head = [
        "seed",
        "scores sum to 1 over",
        "router's rate",
        "clients' rate",
        "experts start",
        "experts in use",
        "accuracy by round",
    ]
    return [head, *map(_line, load(folder, pattern))]


def _line(run: Run) -> list[str]:
    config, curve = run["config"], run["curve"]
    in_use = sorted({sum(name.startswith(ACCURACY_OF) for name in point["metrics"]["tuning"]) for point in curve})
    by_round = ", ".join(f"{point['round']}: {100 * point['tuning']:.1f}" for point in curve)
    return [
        str(run["seed"]),
        f"experts {config['algorithm'].get('normalised_over', 'all')}",
        f"{config['algorithm']['router_rate']:g}",
        f"{config['training']['federated']['learning_rate']:g}",
        "from the common expert" if config["model"].get("start_from") else "at random",
        str(in_use[0]) if len(in_use) == 1 else f"{in_use[0]} to {in_use[-1]}",
        by_round,
    ]
