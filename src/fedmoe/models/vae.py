"""A small variational autoencoder as a density: how likely is x on this client (Reisser et al. 2021, appendix F).

The paper gives the widths and not the likelihood. Inputs may be scaled in any way here, so they are Gaussian, with one
learnt scale. Shape suffixes: B examples, D inputs of one example, L latent dimensions, M draws.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.models.network import Network

LATENT, HIDDEN = 32, (512, 256)


class Reading(NamedTuple):
    """What the network says of x and one draw of the latent noise."""

    restored_BD: Tensor
    mean_BL: Tensor
    log_variance_BL: Tensor
    log_scale_B1: Tensor


class Vae(nn.Module):
    """Maps (x, noise) side by side, (B, D + L), to a `Reading`, its parts side by side: one tensor in, one out."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        wide, narrow = HIDDEN
        self.num_inputs = num_inputs
        self.encoder = nn.Sequential(
            nn.Linear(num_inputs, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU(), nn.Linear(narrow, 2 * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, narrow), nn.ReLU(), nn.Linear(narrow, wide), nn.ReLU(), nn.Linear(wide, num_inputs)
        )
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, joined_BX: Tensor) -> Tensor:
        x_BD, noise_BL = joined_BX.split([self.num_inputs, LATENT], dim=-1)
        mean_BL, log_variance_BL = self.encoder(x_BD).chunk(2, dim=-1)
        restored_BD = self.decoder(mean_BL + noise_BL * (log_variance_BL / 2).exp())
        log_scale_B1 = self.log_scale.expand(x_BD.shape[0], 1)
        return torch.cat([restored_BD, mean_BL, log_variance_BL, log_scale_B1], dim=-1)


@cache
def vae_network(input_shape: tuple[int, ...]) -> Network:
    return Network(lambda: Vae(math.prod(input_shape)), "density")


def read(network: Network, params: Tensors, x_BD: Tensor, noise_BL: Tensor) -> Reading:
    sizes = [x_BD.shape[-1], LATENT, LATENT, 1]
    return Reading(*network(params, torch.cat([x_BD, noise_BL], dim=-1)).split(sizes, dim=-1))


def log_likelihood(x_BD: Tensor, reading: Reading) -> Tensor:
    """log p(x|z) of each example."""
    errors_BD = (x_BD - reading.restored_BD) / reading.log_scale_B1.exp()
    return -(errors_BD.square() / 2 + reading.log_scale_B1 + math.log(2 * math.pi) / 2).sum(-1)


def negative_bound(network: Network, params: Tensors, x: Tensor, noise_BL: Tensor) -> Tensor:
    """-E_q log p(x|z) + KL(q(z|x) || p(z)) of each example, by one draw of z."""
    x_BD = x.flatten(1)
    reading = read(network, params, x_BD, noise_BL)
    divergence_BL = (reading.mean_BL.square() + reading.log_variance_BL.exp() - reading.log_variance_BL - 1) / 2
    return divergence_BL.sum(-1) - log_likelihood(x_BD, reading)


def log_density(network: Network, params: Tensors, x: Tensor, noise_ML: Tensor) -> Tensor:
    """log p(x) of each example, by importance weights of M draws: log mean_m p(x|z_m) p(z_m) / q(z_m|x)."""
    x_BD = x.flatten(1)
    weights_MB = []
    for noise_L in noise_ML:
        reading = read(network, params, x_BD, noise_L.expand(x_BD.shape[0], -1))
        z_BL = reading.mean_BL + noise_L * (reading.log_variance_BL / 2).exp()
        log_ratio_BL = (noise_L.square() - z_BL.square() + reading.log_variance_BL) / 2  # of p(z) to q(z|x)
        weights_MB.append(log_likelihood(x_BD, reading) + log_ratio_BL.sum(-1))
    return torch.stack(weights_MB).logsumexp(0) - math.log(len(noise_ML))
