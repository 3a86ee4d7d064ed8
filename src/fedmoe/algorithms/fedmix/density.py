"""p(s|x) for FedMix (Reisser et al. 2021, eq. 18): every client releases a density of its own inputs, a small VAE."""

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors, Tree
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.models.vae import LATENT, log_density, negative_bound, vae_network
from fedmoe.streams import Streams, torch_stream
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Group
from fedmoe.training.settings import LocalTraining

# Appendix F: Adam with its defaults, batches of 10, stopped after three epochs without a better validation loss.
PLAN = LocalTraining(epochs=100, batch_size=10, learning_rate=1e-3, optimizer="adam", patience=3)
DRAWS = 4  # of the latent variable, for p(x|s): more cost as much again, each


def density_network(setup: AlgorithmSetup) -> Network:
    if not setup.release:
        raise ConfigError(
            "algorithm.new_clients='density' weighs gates that clients release, but schedule.release is off. "
            "Set schedule.release = true, or algorithm.new_clients = 'prior'."
        )
    return vae_network(setup.input_shape)


def train_density(network: Network, data: ClientData, rng: Streams) -> Tensors:
    """One VAE for each client of the cohort, on its opted-in inputs.

    One client after another, however the experts are trained: a million weights in batches of ten live on the cache,
    and side by side they took twice as long.
    """
    longest = max(data.validation.y.shape[1], 1)
    fixed_NL = torch.randn(longest, LATENT, generator=torch_stream("vae", "validation"))

    def losses(trainable: Trainable, _frozen: Tree, batch: Batch) -> Tensor:
        noise_BL = batch.extra["latent"] if batch.training else fixed_NL[: len(batch)]
        return negative_bound(network, trainable["density"], batch.x, noise_BL)

    start_S = trees.stack([network.init(seed) for seed in rng.seeds("density")])
    group = Group(start_S, losses, data.train, PLAN.make_optimizer(), noise=draw_latent)
    stopping = EarlyStopping(losses, data.validation, PLAN.patience)
    trained_S: Tensors = fit({"density": group}, PLAN.schedule, rng, "sequential", stopping=stopping).params["density"]
    return trained_S


def draw_latent(generator: torch.Generator, count: int) -> Tensors:
    return {"latent": torch.randn(count, LATENT, generator=generator)}


def log_densities(network: Network, params_S: Tensors, x: Tensor) -> Tensor:
    """log p(x|s): (S, B). The same draws for every client and every call, so a prediction does not depend on chance."""
    noise_ML = torch.randn(DRAWS, LATENT, generator=torch_stream("vae", "density"))
    size = len(next(iter(params_S.values())))
    return torch.stack([log_density(network, params, x, noise_ML) for params in trees.unstack(params_S, size)])
