"""The machine's own rate: large float32 matrix products, in one process or several at once.

    python benchmarks/matmul.py [--processes 2]

Waits for numbers of products per process on standard input; `against_loops.py` asks.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection

import torch
from serve import serve

SIDE = 2000
FLOP = 2 * SIDE**3  # of one product


def multiply(pipe: Connection) -> None:
    torch.set_num_threads(1)
    left, right, result = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
    while True:
        for _ in range(pipe.recv()):
            torch.mm(left, right, out=result)
        pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    processes = parser.parse_args().processes
    context = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        context.Process(target=multiply, args=(theirs,), daemon=True).start()
        pipes.append(ours)

    def run(products: int) -> None:
        for pipe in pipes:
            pipe.send(products)
        for pipe in pipes:
            pipe.recv()

    serve(run, processes=processes, torch=torch.__version__)


if __name__ == "__main__":
    main()
