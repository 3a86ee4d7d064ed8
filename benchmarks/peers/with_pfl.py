"""A workload in pfl's simulated backend (PyTorch), in one process or several: `python with_pfl.py W1 --processes 2`.

pfl brings its own local training; the model, the data and the fused optimizer are those of the plain loop. Waits for
numbers of rounds on standard input; `against_peers.py` asks.
"""

import argparse
import os
import socket
import subprocess
import sys
from importlib.metadata import version

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import torch
import torch.nn.functional as F
from plain_models import make_model
from plain_training import tensors_of
from serve import serve
from torch import Tensor
from workloads import WORKLOADS, Workload

RANK = "PFL_WORKER_RANK"


def start_other_ranks(processes: int) -> list["subprocess.Popen[str]"]:
    """This process is rank 0; the others are told the rounds that it was asked for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # pfl counts the addresses and connects to the first
    os.environ |= {RANK: "0", "PFL_WORKER_ADDRESSES": ",".join([f"127.0.0.1:{port}"] * processes)}
    command = [sys.executable, __file__, *sys.argv[1:]]
    return [
        subprocess.Popen(command, env={**os.environ, RANK: str(rank)}, stdin=subprocess.PIPE, text=True)
        for rank in range(1, processes)
    ]


class Pfl:
    def __init__(self, workload: Workload) -> None:
        # pfl reads the ranks from the environment when it is imported
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.model.pytorch import PyTorchModel

        self.workload = workload
        everyone = range(workload.num_clients)
        held = [Dataset(tensors_of(workload, client), user_id=str(client)) for client in everyone]
        users = FederatedDataset(held.__getitem__, get_user_sampler("minimize_reuse", list(everyone)))
        self.backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()])
        module = make_model(workload.model, workload.num_classes)

        def loss(x: Tensor, y: Tensor, **_: object) -> Tensor:
            return F.cross_entropy(module(x), y)

        module.loss, module.metrics = loss, lambda *_, **__: {}
        local = torch.optim.Adam if workload.optimizer == "adam" else torch.optim.SGD
        self.model = PyTorchModel(
            module,
            local_optimizer_create=lambda parameters, lr: local(parameters, lr, fused=True),
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )

    def run(self, rounds: int) -> None:
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams

        workload = self.workload
        params = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=workload.clients_per_round,
            val_cohort_size=0,
        )
        local = NNTrainHyperParams(
            local_batch_size=workload.batch_size,
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.learning_rate,
        )
        FederatedAveraging().run(
            params,
            self.backend,
            self.model,
            local,
            NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = RANK not in os.environ
    others = start_other_ranks(arguments.processes) if first and arguments.processes > 1 else []
    pfl = Pfl(WORKLOADS[arguments.workload])
    sharing = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if sharing != arguments.processes:  # each would train every client
        raise RuntimeError(f"pfl shares the clients between {sharing} processes, not {arguments.processes}.")

    def run(rounds: int) -> None:
        for other in others:
            print(rounds, file=other.stdin, flush=True)
        pfl.run(rounds)

    if first:
        serve(run, processes=arguments.processes, pfl=version("pfl"), torch=torch.__version__)
    else:
        for line in sys.stdin:
            pfl.run(int(line))
    for other in others:
        other.communicate()


if __name__ == "__main__":
    main()
