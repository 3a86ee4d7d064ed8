"""Results of made-up runs, as results.json holds them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Result = dict[str, Any]
METHODS = {
    "fedavg": ("FedAvg", {"before": (0.62, 0.60)}),
    "local_only": ("Local", {"after": (0.70, 0.31)}),
    "fine_tuned": ("Fine-tuned", {"before": (0.62, 0.60), "after": (0.78, 0.47)}),
    "specialist_mixture": ("Specialist mixture", {"before": (0.62, 0.60), "after": (0.79, 0.52)}),
    "local_global_mixture": ("Local-global mixture", {"before": (0.62, 0.60), "after": (0.80, 0.51)}),
}


def scores(rng: np.random.Generator, models: dict[str, tuple[float, float]], clients: int, unseen: int) -> list[Result]:
    """Clients scatter around (own, global) accuracy of each model."""
    return [
        {
            "client": client,
            "unseen": client >= clients,
            "model": model,
            "data": data,
            "accuracy": float(np.clip(mean + rng.normal(0, 0.07 if data == "own" else 0.01), 0, 1)),
            "loss": 1.0,
            "examples": 500,
        }
        for model, means in models.items()
        for data, mean in zip(("own", "global"), means, strict=True)
        for client in range(clients + unseen)
    ]


def result(name: str, seed: int, clients: int, unseen: int, rounds: int, classes: int) -> Result:
    title, models = METHODS[name]
    rng = np.random.default_rng(seed)
    losses = 0.4 + 1.9 * np.exp(-np.arange(rounds) / 25) + rng.normal(0, 0.03, rounds)
    history = [
        {"round": i + 1, "reports": {"training_loss": float(loss)}, "rejected": 0, "seconds": 0.2}
        for i, loss in enumerate(losses)
    ]
    joins = name != "local_only"
    return {
        "name": f"digits-demo/{name}-seed{seed}",
        "algorithm": name,
        "title": title,
        "seed": seed,
        "config": {"seed": seed, "data": {"name": "digits"}, "algorithm": {"name": name, "client_rate": 0.05}},
        "versions": {"fedmoe": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "command": "fedmoe compare configs/digits.toml",
        "seconds": 12.3,
        "rounds": rounds if joins else 0,
        "backend": "sequential",
        "model_weights": 62006,
        "scores": scores(rng, models, clients, unseen),
        "history": history if joins else [],
        "class_counts": rng.multinomial(100, rng.dirichlet(np.full(classes, 0.4)), clients).tolist(),
        "class_names": [str(k) for k in range(classes)],
        "split_digest": f"ab12cd{seed}",
        "traffic": {
            "bytes_up": 1_234_567 if joins else 0,
            "bytes_down": 2_469_134 if joins else 0,
            "clients_that_sent": clients if joins else 0,
            "opted_out_clients": 0,
            "rejected": 0,
        },
    }


@pytest.fixture(scope="session")
def make_results() -> Callable[..., list[Result]]:
    def make(
        names: tuple[str, ...] = tuple(METHODS),
        seeds: int = 1,
        clients: int = 12,
        unseen: int = 0,
        rounds: int = 100,
        classes: int = 10,
    ) -> list[Result]:
        return [result(name, seed, clients, unseen, rounds, classes) for name in names for seed in range(seeds)]

    return make
