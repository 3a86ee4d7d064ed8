"""Federations whose clients are made on demand: a million of them cost what the sampled ones cost."""

import numpy as np
import torch
from torch import Tensor

from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.core_types import ClientId, Examples
from fedmoe.errors import ConfigError
from fedmoe.streams import torch_stream


def generated_federation(
    *,
    num_clients: int,
    num_unseen: int = 0,
    num_classes: int = 10,
    num_features: int = 20,
    train_size: int = 20,
    validation_size: int = 10,
    test_size: int = 20,
    global_test_size: int = 500,
    seed: int = 0,
) -> Federation:
    """Gaussian classes around common centres, moved by each client's own shift; every client prefers two classes.

    A client's examples follow from (seed, client id) alone, so nothing is stored.
    """
    if num_clients < 1 or num_classes < 2:
        raise ConfigError(
            f"split.num_clients={num_clients} with {num_classes} classes: one client and two classes are the least."
        )
    centres_CF = 2 * torch.randn(num_classes, num_features, generator=torch_stream(seed, "generated", "centres"))

    def draw(stream: torch.Generator, size: int, shift_F: Tensor, weights_C: Tensor) -> Examples:
        y = torch.multinomial(weights_C, size, replacement=True, generator=stream)
        return examples(centres_CF[y] + shift_F + torch.randn(size, num_features, generator=stream), y)

    def load(client: ClientId) -> Records:
        stream = torch_stream(seed, "generated", client)
        shift_F = 0.5 * torch.randn(num_features, generator=stream)
        weights_C = torch.full((num_classes,), 0.4 / num_classes)
        weights_C[torch.randperm(num_classes, generator=stream)[:2]] += 0.3
        train, validation, test = (
            draw(stream, size, shift_F, weights_C) for size in (train_size, validation_size, test_size)
        )
        return Records(
            train,
            validation,
            test,
            torch.ones(train_size, dtype=torch.bool),
            torch.ones(validation_size, dtype=torch.bool),
        )

    everyone = draw(
        torch_stream(seed, "generated", "global"), global_test_size, torch.zeros(num_features), torch.ones(num_classes)
    )
    return Federation(
        num_clients=num_clients,
        num_unseen=num_unseen,
        num_classes=num_classes,
        input_shape=(num_features,),
        participants=np.arange(num_clients),
        global_test=everyone,
        load=load,
        digest=f"generated:{seed}:{num_clients}:{num_classes}:{num_features}",
    )
