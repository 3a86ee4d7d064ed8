"""What a round of other methods costs beside one of FedAvg: ratios of times and of bytes, and what is not native.

    python benchmarks/method_costs.py [--turns 7] [--rounds 3]

The clients, model, batches and epochs of W1, in one process without other workers: what is measured is the work itself.
Methods take turns, so all of them see the same machine. Plain SGD for all, since SCAFFOLD is defined for nothing else.
One line, also into results/speed.json.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from load import OtherWork
from ours import MODELS, federation_of
from record import record
from turns import Line, machine, ratios
from workloads import TITLES, WORKLOADS

from fedmoe.assembly import Parts, build
from fedmoe.clients.federation import Federation
from fedmoe.config import parse_config
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.session import Session
from fedmoe.result import versions

WORKLOAD = WORKLOADS["W1"]
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox"},
    "SCAFFOLD": {"name": "scaffold"},
    "Ditto": {"name": "ditto"},
    "FedRep, 10 epochs of the head": {"name": "fedrep"},
    "FedPer": {"name": "fedrep", "joint": True},
    "APFL": {"name": "apfl"},
}


def parts_of(algorithm: dict[str, Any], federation: Federation) -> Parts:
    plan = {"epochs": WORKLOAD.epochs, "batch_size": WORKLOAD.batch_size, "learning_rate": 0.01, "optimizer": "sgd"}
    config = {
        "algorithm": algorithm,
        "model": MODELS[WORKLOAD.model],
        "training": {"federated": plan},
        "schedule": {"clients_per_round": WORKLOAD.clients_per_round, "rounds": 10**9},  # none of them validates
        "engine": {"workers": 1},
    }
    if algorithm["name"] != "fedrep":  # which does not validate at all
        config["algorithm"] = {**algorithm, "validate_every": 10**9}
    return build(parse_config(config), federation=federation)


def seconds_of(session: Session, rounds: int) -> float:
    begun = time.perf_counter()
    for _ in range(rounds):
        session.next_round()
    return time.perf_counter() - begun


def bytes_of_a_round(session: Session) -> int:
    """Both ways, of all clients of one more round."""
    before = _bytes(session)
    session.next_round()
    return _bytes(session) - before


def _bytes(session: Session) -> int:
    manifest = session.manifest.as_dict()
    tables = (manifest["sent_by_clients"], manifest["received_by_clients"])
    return sum(row["bytes"] for table in tables for rows in table.values() for row in rows.values())


def measure(turns: int, rounds: int) -> dict[str, Line]:
    federation = federation_of(WORKLOAD)
    parts = {name: parts_of(algorithm, federation) for name, algorithm in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sessions = {}
        for number, (name, one) in enumerate(parts.items()):
            transport = stack.enter_context(open_transport(one, folder / f"{number}.sqlite", "benchmark"))
            sessions[name] = Session(one, transport)
            seconds_of(sessions[name], 2)  # to warm up
        for turn in range(turns):
            for name in list(METHODS)[:: -1 if turn % 2 else 1]:
                seconds[name].append(seconds_of(sessions[name], rounds))
        sent = {name: bytes_of_a_round(session) for name, session in sessions.items()}
    return {
        name: {
            "time": ratios(seconds[name], seconds["FedAvg"]),
            "bytes": round(sent[name] / sent["FedAvg"], 3),
            "backend": parts[name].backend,
            "fallbacks": parts[name].fallback_notes(),
            "seconds": [round(second, 4) for second in seconds[name]],
        }
        for name in METHODS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    others = OtherWork()
    methods = measure(arguments.turns, arguments.rounds)
    what = f"{TITLES[WORKLOAD.name]}; here plain SGD".replace(", Adam", "")
    busy = {"cores_busy_with_others": round(others.cores(), 2)}
    record("methods", WORKLOAD.name, {"what": what, "methods": methods, **busy, **machine(), **versions()})


if __name__ == "__main__":
    main()
