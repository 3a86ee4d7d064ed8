"""Which settings the experiments under differential privacy get: those of Peterson, Kanani and Marathe (2019), who
print none of them, and of the prior mixture whose shared stage is private.

One rule: of a few values, the ones with the best score on held-out *training* mails, or on the validation records of
the other experiments, mean over users, folds and the levels of noise that share them. Test data are never read.
First the number of hashed words, by federated learning alone at its best rates; then for each method its learning rate,
and in the synthetic regression also its clip norm. Mails: 40 of a user's 50 train and 10 are scored, in two folds.

    FEDMOE_DATA=... python benchmarks/choose_domain_expert_settings.py RUNS [--task spam ...]

Runs that are finished in RUNS are not made again; the scores go to results/domain_experts_settings/tried/.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from choose_fedmix_defaults import scored_on_validation

import fedmoe
from fedmoe.clients.federation import Federation, Records, take
from fedmoe.config import read_config
from fedmoe.core_types import ClientId
from fedmoe.evaluation.answers import with_headline
from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.federations import build_federation
from fedmoe.storage.results import read_results

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "results" / "domain_experts_settings" / "tried"
FIRST_SEED = 1000  # no table uses it, nor those after
HELD_OUT = 10  # mails of a user in a fold

Changes = tuple[str, ...]
Grid = dict[str, tuple[Any, ...]]

LOCAL = ("algorithm={name='local_only'}",)
FEDERATED = ("algorithm={name='fedavg'}",)
FIRST = ("algorithm={name='domain_experts',variant=1}",)
SECOND = ("algorithm={name='domain_experts',variant=2}",)
PRIORS = ("algorithm={name='prior_mixture'}",)
RATES = (0.03, 0.1, 0.3, 1.0)
LOW_RATES = (0.01, 0.03, 0.1, 0.3)  # squared errors of 15 have large gradients
FEDERATED_RATE, LOCAL_RATE = "training.federated.learning_rate", "training.local.learning_rate"
SEEDED = ("privacy.noise_source='seeded'",)
MAILS = ("privacy.sampling_rate=0.2", *SEEDED)  # of 25 mails of the models' half, or of all 50
POINTS = ("privacy.sampling_rate=0.04", "privacy.expected_batch_size=50", *SEEDED)
PRIVATE = "prior_mixture_fashion_mnist_private"
EPSILONS = (1000, 8, 2)  # at 1000 gradients are clipped, and hardly noised
LARGE_BATCH = ("training.federated.batch_size=10",)


class Choice(NamedTuple):
    """One method of one experiment: what is tried at each level of noise; the best mean over levels wins."""

    config: str
    method: str
    changes: Changes
    levels: dict[str, Changes]
    grid: Grid
    folds: int = 2


def spam(method: str, changes: Changes, levels: dict[str, Changes], grid: Grid) -> Choice:
    return Choice("domain_experts_spam", method, changes, levels, grid)


def choices() -> Iterator[tuple[str, Choice]]:
    """By name."""
    clear: dict[str, Changes] = {"no noise": ()}
    noised = {f"ε = {e}": (f"privacy.target_epsilon={e}", *MAILS) for e in (4,)}
    by_rate: Grid = {FEDERATED_RATE: RATES}
    words: Grid = {"data.vocabulary_size": (500, 2000, 8000), **by_rate}
    alone = (*FEDERATED, *LARGE_BATCH)
    yield "spam-words", spam("FedAvg", alone, clear, words)
    yield "spam-words-noised", spam("FedAvg", alone, noised, words)
    yield "spam-local", spam("Local", LOCAL, clear, {LOCAL_RATE: RATES})
    for name, levels in (("", clear), ("-noised", noised)):
        yield f"spam-fedavg{name}", spam("FedAvg", alone, levels, by_rate)
        yield f"spam-algorithm1{name}", spam("Algorithm 1", FIRST, levels, by_rate)
        yield f"spam-algorithm2{name}", spam("Algorithm 2", SECOND, levels, by_rate)
    for loss, norms, rates in (("squared", (10.0, 100.0), LOW_RATES), ("absolute", (10.0,), RATES)):
        common = (f"training.loss='{loss}'",)
        synthetic = "domain_experts_synthetic"
        grid = {"privacy.clip_norm": norms, FEDERATED_RATE: rates}
        noise = {f"σ = {s}": (f"privacy.noise_multiplier={s}.0", *POINTS) for s in (0, 4)}
        rarer = {level: (*set_, "privacy.sampling_rate=0.02") for level, set_ in noise.items()}
        yield f"{loss}-local", Choice(synthetic, "Local", (*common, *LOCAL), clear, {LOCAL_RATE: rates}, 1)
        yield f"{loss}-fedavg", Choice(synthetic, "FedAvg", (*common, *FEDERATED), rarer, grid, 1)
        yield f"{loss}-algorithm1", Choice(synthetic, "Algorithm 1", (*common, *FIRST), noise, grid, 1)
        yield f"{loss}-algorithm2", Choice(synthetic, "Algorithm 2", (*common, *SECOND), noise, grid, 1)
    for epsilon, (method, changes) in itertools.product(EPSILONS, (("FedAvg", FEDERATED), ("Prior mixture", PRIORS))):
        levels = {f"ε = {epsilon}": (f"privacy.target_epsilon={epsilon}",)}
        name = f"private-{method.lower().replace(' ', '-')}-{epsilon}"
        yield name, Choice(PRIVATE, method, changes, levels, {FEDERATED_RATE: (0.3, 1.0, 3.0, 10.0)}, 1)


@lru_cache(maxsize=8)
def federation(config: str, words: int | None, fold: int) -> Federation:
    """Whose test data are records held out of training; loaded once."""
    changes = [] if words is None else [f"data.vocabulary_size={words}"]
    changes += [f"seed={FIRST_SEED}"] if config == PRIVATE else []  # clients that no table has
    whole = build_federation(read_config(ROOT / "configs" / f"{config}.toml", changes)).federation
    found = without_fold(whole, fold) if config == "domain_experts_spam" else scored_on_validation(whole)
    return replace(found, load=lru_cache(maxsize=None)(found.load))


def without_fold(whole: Federation, fold: int) -> Federation:
    """Some of the training records are scored, and are trained on no more."""

    def load(client: ClientId) -> Records:
        own = whole.load(client)
        rows = range(len(own.train.y))
        scored = [row for row in rows if row // HELD_OUT == fold]
        kept = [row for row in rows if row // HELD_OUT != fold]
        return Records(
            take(own.train, kept), own.validation, take(own.train, scored),
            own.train_opted_in[kept], own.validation_opted_in,
        )  # fmt: skip

    return replace(whole, load=load, digest=f"{whole.digest} fold {fold}")


def tried(name: str, choice: Choice, runs: Path) -> Iterator[dict[str, Any]]:
    """One row per run: its settings and its score."""
    for values in itertools.product(*choice.grid.values()):
        setting = dict(zip(choice.grid, values, strict=True))
        for level, fold in itertools.product(choice.levels, range(choice.folds)):
            folder = runs / name / "-".join(map(str, values)) / f"{level.replace(' ', '')}-fold{fold}"
            if not (folder / "results.json").exists():
                made = [*choice.changes, *choice.levels[level], *(f"{key}={value}" for key, value in setting.items())]
                config = read_config(
                    ROOT / "configs" / f"{choice.config}.toml",
                    [*made, f"seed={FIRST_SEED + fold}", "engine.workers=1", f"name=choose-{name}"],
                )
                clients = federation(choice.config, setting.get("data.vocabulary_size"), fold)
                fedmoe.run(config, federation=clients, directory=folder)
            row = {**setting, "level": level, "fold": fold, "score": score_of(folder)}
            print(name, *row.values(), sep="\t", flush=True)
            yield row


def score_of(folder: Path) -> float:
    """Mean over users, with what they end with: accuracy, or the error of a regression."""
    results = read_results(folder)
    own = [score for score in with_headline(results)["scores"] if score["data"] == "own" and not score["unseen"]]
    last = "after" if any(score["model"] == "after" for score in own) else "before"
    return round(fmean(figure_of([results]).of(score) for score in own if score["model"] == last), 5)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", type=Path)
    arguments.add_argument("--task", nargs="*", default=["spam", "squared", "absolute", "private"])
    asked = arguments.parse_args()
    STORED.mkdir(parents=True, exist_ok=True)
    for name, choice in choices():
        if name.split("-")[0] in asked.task:
            rows = list(tried(name, choice, asked.runs))
            head = {
                "method": choice.method,
                "config": choice.config,
                "changes": choice.changes,
                "levels": choice.levels,
            }
            lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
            text = json.dumps(head, ensure_ascii=False)[:-1] + f', "tried": [\n  {lines}\n]}}\n'
            (STORED / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
