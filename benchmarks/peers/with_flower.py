"""A workload in Flower's simulation (Ray), one actor per core: `python with_flower.py W1 --processes 2`.

Flower brings no local training, so its clients run that of the plain loop. Waits for numbers of rounds on standard
input; `against_peers.py` asks.
"""

import argparse
import os
from collections.abc import Iterable

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import flwr
import ray
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain_models import make_model
from plain_training import tensors_of, train_classifier, train_mixture
from serve import serve
from workloads import WORKLOADS, Workload


def train(workload: Workload, message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = make_model(workload.model, workload.num_classes)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = tensors_of(workload, int(context.node_config["partition-id"]))
    if workload.averages:
        train_classifier(model, workload, *data)
    else:  # the mixture stays with the client; what comes back is what was sent
        context.state["mixture"] = ArrayRecord(train_mixture(model, workload, *data))
    metrics = MetricRecord({"num-examples": workload.num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class StrictFedAvg(FedAvg):
    """A client that fails ends the benchmark: a round without it would be less work."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error}")
        return super().aggregate_train(server_round, replies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    workload, processes = WORKLOADS[arguments.workload], arguments.processes
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(lambda message, context: train(workload, message, context))

    @server_app.main()
    def rounds_on_request(grid: Grid, _context: Context) -> None:
        strategy = StrictFedAvg(
            fraction_train=workload.clients_per_round / workload.num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.clients_per_round,
            min_available_nodes=workload.num_clients,
        )
        arrays = ArrayRecord(make_model(workload.model, workload.num_classes).state_dict())
        serve(
            lambda rounds: strategy.start(grid, arrays, num_rounds=rounds),
            processes=processes,
            flwr=flwr.__version__,
            ray=ray.__version__,
            torch=torch.__version__,
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.num_clients,
        backend_config={
            "init_args": {"num_cpus": processes, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
