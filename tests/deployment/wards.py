"""A table of three wards in which one column means the opposite on the coast, and a run that was trained on it."""

import numpy as np

import fedmoe
from fedmoe.clients.own_table import federation_from_table

COLUMNS = ("ward", "age", "pressure", "smoker", "outcome")
CONFIG = {
    "algorithm": {"name": "specialist_mixture"},
    "model": {"name": "mlp", "hidden": [6]},
    "training": {"personal": {"epochs": 3}},
    "schedule": {"rounds": 2, "clients_per_round": "all"},
    "engine": {"workers": 1},
}


def ward_rows(count=60, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ward, age, pressure = ("north", "south", "coast")[number % 3], rng.normal(), rng.normal()
        smoker = "yes" if rng.random() < 0.5 else "no"
        ill = age + (pressure if ward != "coast" else -pressure) > 0
        rows.append(dict(zip(COLUMNS, (ward, age, pressure, smoker, "ill" if ill else "well"), strict=True)))
    return rows


def trained(directory, rows=None, **changes):
    federation = federation_from_table(rows or ward_rows(), client="ward", label="outcome", opted_out=["coast"])
    return fedmoe.run({**CONFIG, **changes}, federation=federation, directory=directory)
