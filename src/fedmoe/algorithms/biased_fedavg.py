"""Biased FedAvg: FedAvg with an output bias of each client's own. A baseline of Reisser et al. (2021), Section 4.

The bias of the expert's last linear layer never leaves its client; everything else is averaged. So it can follow a
client's label skew, and no other difference between clients.
A client that never trained predicts with the mean of the released biases (Appendix F there) if `schedule.release` is
on, and otherwise with the bias that everyone starts from: the expert's initial one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.partial_personalization import (
    Broadcast,
    ClientState,
    PartialPersonalizationConfig,
    PersonalState,
    fit_private,
    partial_personalization,
    predict_with,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import Tensors


def biased_fedavg(config: PartialPersonalizationConfig, setup: AlgorithmSetup) -> Algorithm:
    expert = setup.expert
    return partial_personalization(config, setup, {expert.output_bias_name}, mean_of_clients)._replace(
        predict=lambda b, c, personal, x: predict(setup, b, c, personal, x),
        personalize=lambda b, c, _personal, data, rng: fit_private(
            setup, b, c._replace(private=bias_of(b, c)), data, rng
        ),
    )


def mean_of_clients(biases: Sequence[Tensors]) -> Tensors:
    """Clients count alike: the paper names no weights."""
    return {name: torch.stack([bias[name] for bias in biases]).mean(0) for name in biases[0]}


def bias_of(shared: Broadcast, client: ClientState) -> Tensors:
    """A client's own bias, or the released one if it never trained. Of one client, or of a cohort."""
    never_trained = (client.rounds == 0)[..., None]
    return {
        name: torch.where(never_trained, shared.released.get(name, bias), bias) for name, bias in client.private.items()
    }


def predict(
    setup: AlgorithmSetup, shared: Broadcast, client: ClientState, personal: PersonalState | None, x: Tensor
) -> Tensor:
    return predict_with(setup, shared, personal.private if personal else bias_of(shared, client), x)
