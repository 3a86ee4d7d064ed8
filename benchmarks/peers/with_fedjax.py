"""A workload in fedjax with its default (jit) backend: `python with_fedjax.py W1 [--convolution products]`.

JAX spreads over the cores by itself. Its convolution of few channels is slow on a CPU, so the small CNN is measured
with the convolution written as a matrix product, too. Waits for numbers of rounds on standard input;
`against_peers.py` asks.
"""

import argparse
from importlib.metadata import version
from typing import Any

import jax

if not hasattr(jax, "tree_map"):  # fedjax 0.0.17 calls it by the name that newer versions of JAX have dropped
    jax.tree_map = jax.tree_util.tree_map

import fedjax
import haiku as hk
import jax.numpy as jnp
import numpy as np
from serve import serve
from workloads import NUM_CLASSES, WORKLOADS, Workload, client_data

Array = Any
Batch = dict[str, Array]


def convolve(x: Array, channels: int, convolution: str) -> Array:
    if convolution == "library":
        return hk.Conv2D(channels, 5, padding="VALID")(x)
    rows, columns = x.shape[1] - 4, x.shape[2] - 4
    patches = [x[:, i : i + rows, j : j + columns] for i in range(5) for j in range(5)]
    return hk.Linear(channels)(jnp.concatenate(patches, axis=-1))


def pool(x: Array) -> Array:
    """The largest of each 2 x 2 pixels."""
    count, rows, columns, channels = x.shape
    return x.reshape(count, rows // 2, 2, columns // 2, 2, channels).max((2, 4))


def scores(workload: Workload, convolution: str, batch: Batch) -> Array:
    x = batch["x"]
    if workload.model == "cnn":
        for channels in (6, 16):
            x = pool(jax.nn.relu(convolve(x, channels, convolution)))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = jax.nn.relu(hk.Linear(width)(x))
    return hk.Linear(NUM_CLASSES)(x)


def examples(workload: Workload, client: int) -> Batch:
    """The same tensors; images with channels last, as JAX wants them."""
    x, y = client_data(workload, client)
    return {"x": np.ascontiguousarray(np.moveaxis(x, 1, -1)) if x.ndim == 4 else x, "y": y.astype(np.int32)}


def cross_entropy(batch: Batch, logits: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]


class Fedjax:
    def __init__(self, workload: Workload, convolution: str) -> None:
        clients = {str(client): examples(workload, client) for client in range(workload.num_clients)}
        data = fedjax.InMemoryFederatedData(clients)
        sample = next(iter(fedjax.ClientDataset(clients["0"]).batch(batch_size=workload.batch_size)))
        transformed = hk.transform(lambda batch: scores(workload, convolution, batch))
        model = fedjax.create_model_from_haiku(transformed, sample, train_loss=cross_entropy)
        make = fedjax.optimizers.adam if workload.optimizer == "adam" else fedjax.optimizers.sgd
        self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            fedjax.model_grad(model),
            make(workload.learning_rate),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=workload.epochs),
        )
        self.state = self.algorithm.init(model.init(jax.random.PRNGKey(0)))
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(data, workload.clients_per_round, seed=0)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.state, _ = self.algorithm.apply(self.state, self.sampler.sample())
        jax.block_until_ready(self.state.params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=[name for name, w in WORKLOADS.items() if w.model in ("cnn", "logistic")])
    parser.add_argument("--convolution", choices=("library", "products"), default="library")
    arguments = parser.parse_args()
    system = Fedjax(WORKLOADS[arguments.workload], arguments.convolution)
    serve(system.run, convolution=arguments.convolution, fedjax=version("fedjax"), jax=jax.__version__)


if __name__ == "__main__":
    main()
