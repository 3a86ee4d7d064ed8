"""Tables of scores, from stored runs: methods and their answers, seeds, and differences between methods.

Each takes the folder of a results page and a pattern of its runs; `results_page.py` has the names that pages use.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from stored_runs import Run, load

from fedmoe.evaluation.answers import TOLD, by_answer
from fedmoe.evaluation.summary import final_model, interval, summarise


def methods(folder: Path, pattern: str) -> list[list[str]]:
    """Accuracy in percent, mean over clients, before → after personalisation, ± 95% over seeds."""
    return scores_of(load(folder, pattern), headlines=True)


def brief(folder: Path, pattern: str) -> list[list[str]]:
    """Of these columns the ones that a first reader asks for."""
    header, *rows = methods(folder, pattern)
    shown = [header.index(name) for name in ("method", "own data", "global", "unseen clients", "GB up and down")]
    return [[line[column] for column in shown] for line in (header, *rows)]


def answers(folder: Path, pattern: str) -> list[list[str]]:
    """The same of the further answers of methods, such as those with label frequencies that were told or estimated."""
    return scores_of(load(folder, pattern), headlines=False)


def scores_of(runs: Sequence[Run], *, headlines: bool) -> list[list[str]]:
    titles = {run["title"] for run in runs}
    rows = [row for row in summarise(runs) if (row["title"] in titles) == headlines]
    parts = {"own": "own data", "global": "global", "unseen": "unseen clients", "pooled": "new client, pooled data"}
    parts = {part: title for part, title in parts.items() if any(row[part] for row in rows)}
    metrics = [name for name in METRICS if all(row["metrics"].get(name) for row in rows)]
    header = [
        "method",
        "seeds",
        *parts.values(),
        "worst 10% of own",
        *(METRICS[name] for name in metrics),
        "GB up and down",
    ]
    table = [header]
    for row in rows:
        own = [run for run in by_answer(runs) if run["title"] == row["title"]]
        table.append(
            [
                row["title"].replace("|", r"\|"),
                ", ".join(str(run["seed"]) for run in own),
                *(accuracy(row[part]) for part in parts),
                f"{100 * row['own']['worst_decile']:.1f}",
                *(f"{row['metrics'][name]['mean']:.3f}" for name in metrics),
                gigabytes(own),
            ]
        )
    return table


METRICS = {"log_loss": "log loss, own", "ece": "calibration error, own"}


def gigabytes(runs: Sequence[Run]) -> str:
    """Up and down, rounds and delivery, mean over seeds."""
    return f"{fmean(run['traffic']['bytes_up'] + run['traffic']['bytes_down'] for run in runs) / 1e9:.2f}"


def accuracy(cell: Run | None) -> str:
    if cell is None:
        return "–"
    before = "" if cell["before"] is None else f"{100 * cell['before']:.1f} → "
    return before + f"{100 * cell['mean']:.1f}" + spread(cell["interval"])


def spread(half_width: float | None) -> str:
    return "" if half_width is None else f" ± {100 * half_width:.1f}"


def choice(folder: Path, pattern: str) -> list[list[str]]:
    """Own accuracy (and loss) of the last round's model by data set, mean over clients and seeds; against FedAvg."""
    runs = load(folder, pattern)
    tasks = list(dict.fromkeys(run["name"] for run in runs))
    found = {(run["title"], run["name"], run["seed"]): own_before(run) for run in runs}
    table = [["method", *tasks, "ahead of FedAvg, mean", "worst data set"]]
    for title in dict.fromkeys(run["title"] for run in runs):
        cells, ahead = [], []
        for task in tasks:
            own = [value for (method, data, _), value in found.items() if (method, data) == (title, task)]
            base = [value for (method, data, _), value in found.items() if (method, data) == ("FedAvg", task)]
            cells.append(f"{100 * fmean(a for a, _ in own):.1f} ({fmean(loss for _, loss in own):.3f})")
            ahead.append(fmean(a for a, _ in own) - fmean(a for a, _ in base))
        table.append([title, *cells, f"{100 * fmean(ahead):+.1f}", f"{100 * min(ahead):+.1f}"])
    return table


def own_before(run: Run) -> tuple[float, float]:
    return mean_over_clients(run, "own", "accuracy"), mean_over_clients(run, "own", "loss")


def mean_over_clients(run: Run, data: str, key: str, model: str = "before") -> float:
    """Over the clients that took part in training; pooled data are those of a new client."""
    wanted = (data, model, data == "pooled")
    return fmean(score[key] for score in run["scores"] if (score["data"], score["model"], score["unseen"]) == wanted)


def seeds(folder: Path, pattern: str) -> list[list[str]]:
    """Accuracy before personalisation by seed: on own data and, where it was measured, of a new client; means ± 95%."""
    runs = load(folder, pattern)
    numbers = sorted({run["seed"] for run in runs})
    parts = {"own": "own data", "pooled": "new client"}
    parts = {data: name for data, name in parts.items() if any(s["data"] == data for s in runs[0]["scores"])}
    named = [[f"{name}: seed {n}" for n in numbers] + [f"{name}: mean"] for name in parts.values()]
    columns = [column for columns in named for column in columns]
    table = [["method", *columns, "global: mean", "own data: less FedAvg of the same seed", "GB up and down"]]
    fedavg = {run["seed"]: mean_over_clients(run, "own", "accuracy") for run in runs if run["title"] == "FedAvg"}
    for title in dict.fromkeys(run["title"] for run in runs):
        mine = {run["seed"]: run for run in runs if run["title"] == title}
        cells = []
        for data in parts:
            found = {seed: mean_over_clients(run, data, "accuracy") for seed, run in mine.items()}
            cells += [f"{100 * found[n]:.1f}" if n in found else "–" for n in numbers]
            cells.append(over_seeds(list(found.values())))
        balanced = [mean_over_clients(run, "global", "accuracy") for run in mine.values()]
        ahead = [mean_over_clients(run, "own", "accuracy") - fedavg[n] for n, run in mine.items() if n in fedavg]
        less = over_seeds(ahead) if ahead and title != "FedAvg" else "–"
        table.append([title.replace("|", r"\|"), *cells, over_seeds(balanced), less, gigabytes(list(mine.values()))])
    return table


def over_seeds(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f}" + spread(interval(values))


def less(folder: Path, pattern: str, base: str) -> list[list[str]]:
    """Every method, by its final models, less the one titled `base` (_ for a space) of the same seed: mean ± 95%.

    Accuracy in points, loss as it is; over the seeds that both have; without answers that were told label frequencies.
    """
    runs = [run for run in by_answer(load(folder, pattern)) if run["answer"] not in TOLD]
    title = base.replace("_", " ")
    bases = {run["seed"]: run for run in runs if run["title"] == title}
    columns = [part for part in COMPARED if all(final_scores(run, *COMPARED[part][:2]) for run in runs)]
    table = [[f"less {title}", *columns]]
    for other in dict.fromkeys(run["title"] for run in runs if run["title"] != title):
        found = [run for run in runs if run["title"] == other and run["seed"] in bases]
        if found:
            cells = [difference([(run, bases[run["seed"]]) for run in found], *COMPARED[part]) for part in columns]
            table.append([other.replace("|", r"\|"), *cells])
    return table


COMPARED = {
    "own, accuracy": ("own", False, "accuracy"),
    "global, accuracy": ("global", False, "accuracy"),
    "unseen clients, accuracy": ("own", True, "accuracy"),
    "own, loss": ("own", False, "loss"),
    "global, loss": ("global", False, "loss"),
}


def difference(pairs: Sequence[tuple[Run, Run]], data: str, unseen: bool, key: str) -> str:
    means = [[fmean(score[key] for score in final_scores(run, data, unseen)) for run in pair] for pair in pairs]
    ahead = [first - second for first, second in means]
    half, scale, digits = interval(ahead), *((100, 1) if key == "accuracy" else (1, 3))
    within = "" if half is None else f" ± {scale * half:.{digits}f}"
    return f"{scale * fmean(ahead):+.{digits}f}{within}"


def final_scores(run: Run, data: str, unseen: bool) -> list[Run]:
    wanted = (data, unseen, final_model(run))
    return [score for score in run["scores"] if (score["data"], score["unseen"], score["model"]) == wanted]
