"""Tables of prior mixture beside the methods that it is measured against, one line for each setting and optimizers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from score_tables import difference, final_scores, over_seeds
from stored_runs import Run, load

from fedmoe.evaluation.answers import with_headline
from fedmoe.evaluation.choices import choices

OURS = "prior_mixture"
OWN, BALANCED = ("own", False, "accuracy"), ("global", False, "accuracy")  # data, of unseen clients, which score


def expected(folder: Path, pattern: str) -> list[list[str]]:
    """Own accuracy beside the best rival's, balanced accuracy beside FedAvg's; differences of the same seeds ± 95%.

    Methods are compared where clients and server have the same optimizers, and by their own answers, without our
    calibration and frequencies. Which rival is best is known in hindsight, by the test data of these very runs; those
    with fewer seeds than ours are left out.
    """
    own, balanced = ["own", "best rival", "its own", "ahead by"], ["global", "FedAvg's", "ahead by"]
    head = ["setting", "optimizers", "seeds", *own, *balanced]
    cells = by_setting(map(with_headline, load(folder, pattern)))
    ours = {names: runs for names, runs in cells.items() if any(run["algorithm"] == OURS for run in runs)}
    return [head, *([*names, *_beside_rivals(runs)] for names, runs in ours.items())]


def _beside_rivals(runs: Sequence[Run]) -> list[str]:
    ours = {run["seed"]: run for run in runs if run["algorithm"] == OURS}
    rivals: dict[str, list[Run]] = {}
    for run in runs:
        if run["algorithm"] != OURS and run["seed"] in ours:
            rivals.setdefault(run["title"], []).append(run)
    rivals = {title: found for title, found in rivals.items() if len(found) == len(ours)}
    best = max(rivals, key=lambda title: fmean(_mean(run, OWN) for run in rivals[title]))
    fedavg = [run for found in rivals.values() for run in found if run["algorithm"] == "fedavg"]
    cells = [", ".join(map(str, sorted(ours)))]
    for part, named, rival in ((OWN, [best], rivals[best]), (BALANCED, [], fedavg)):
        pairs = [(ours[run["seed"]], run) for run in rival]
        means = [over_seeds([_mean(run, part) for run in side]) for side in zip(*pairs, strict=True)]
        cells += [means[0], *named, means[1], difference(pairs, *part)]
    return cells


def candidates(folder: Path, pattern: str) -> list[list[str]]:
    """Own accuracy of each candidate and how many clients chose it; what the best of them had over the choice."""
    cells = by_setting(run for run in load(folder, pattern) if run["algorithm"] == OURS)
    names = next(iter(cells.values()))[0]["answers"]["candidates"]
    table = [["setting", "optimizers", *names, "mean regret", "better off alone"]]
    for setting, runs in cells.items():
        made = [choice for run in runs for choice in choices(run) if not choice.unseen]
        chosen = Counter(choice.chosen for choice in made)
        accuracies = {name: fmean(_mean(_answering(run, name), OWN) for run in runs) for name in names}
        alone = sum(choice.worth is not None and choice.worth < 0 for choice in made)
        table.append(
            [
                *setting,
                *(f"{100 * accuracies[name]:.1f} ({chosen[name]})" for name in names),
                f"{100 * fmean(choice.regret for choice in made):.1f}",
                f"{alone} of {len(made)}",
            ]
        )
    return table


def by_setting(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((setting_of(run), optimizers_of(run)), []).append(run)
    return dict(sorted(found.items()))


def setting_of(run: Run) -> str:
    data, split = run["config"]["data"]["name"], run["config"]["split"]
    shown = {"majority": f"p = {split.get('share')}", "dirichlet": f"Dirichlet {split.get('alpha')}"}
    return f"{data}, {shown.get(split['kind'], split['kind'])}"


def optimizers_of(run: Run) -> str:
    """Of clients in the rounds, and of the server; a method without rounds stands with servers that average."""
    clients, server = run["config"]["training"]["federated"], run["config"]["algorithm"].get("server_optimizer")
    named = f"{server['name']} {server['learning_rate']:g}" if server else "averages"
    return f"{clients['optimizer']} {clients['learning_rate']:g}, server {named}"


def _answering(run: Run, name: str) -> Run:
    return {**run, "scores": [score for score in run["scores"] if score.get("answer") == name]}


def _mean(run: Run, part: tuple[str, bool, str]) -> float:
    data, unseen, key = part
    return fmean(score[key] for score in final_scores(run, data, unseen))
