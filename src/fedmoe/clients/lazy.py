"""Federations whose clients are made or read on demand: a million of them cost what the sampled ones cost."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.errors import ConfigError, DataError
from fedmoe.streams import torch_stream
from fedmoe.vocabulary import ClientId, Examples


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


def folder_federation(folder: Path, read: Callable[[Path], tuple[Tensor, Tensor]], seed: int = 0) -> Federation:
    """One file per client, in the order of file names, read when the client is asked for.

    A fifth of a client's rows is its test data, a fifth its validation data (at least one row trains), by a seeded
    shuffle. The global test set is the test rows of the first hundred clients.
    """
    paths = sorted(path for path in folder.glob("*.npz") if path.is_file()) if folder.is_dir() else []
    if not paths:
        raise DataError(f"{folder} holds no .npz file. Put one file per client there, each with arrays x and y.")
    first_x, _ = read(paths[0])

    def load(client: ClientId) -> Records:
        x, y = read(paths[client])
        if x.shape[1:] != first_x.shape[1:]:
            raise DataError(
                f"{paths[client]}: examples of shape {tuple(x.shape[1:])}, but {paths[0].name} has "
                f"{tuple(first_x.shape[1:])}. Give all clients the same features."
            )
        order = torch.randperm(len(y), generator=torch_stream(seed, "folder", client))
        held_out = len(y) // 5
        parts = order.split([held_out, held_out, len(y) - 2 * held_out])
        test, validation, train = (examples(x[rows], y[rows]) for rows in parts)
        masks = (torch.ones(len(part.y), dtype=torch.bool) for part in (train, validation))
        return Records(train, validation, test, *masks)

    tests = [load(client).test for client in range(min(100, len(paths)))]
    labels = torch.cat([read(path)[1] for path in paths])
    return Federation(
        num_clients=len(paths),
        num_unseen=0,
        num_classes=int(labels.max()) + 1,
        input_shape=tuple(first_x.shape[1:]),
        participants=np.arange(len(paths)),
        global_test=examples(torch.cat([one.x for one in tests]), torch.cat([one.y for one in tests])),
        load=load,
        names=[path.stem for path in paths],
        digest=f"folder:{len(paths)}:{len(labels)}",
    )
