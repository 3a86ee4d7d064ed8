"""Which examples a step sees: shuffled batches of each client, for one client or side by side for several."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedmoe.core_types import Examples, Tensors
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.devices import to_device
from fedmoe.training.inference import pad_rows


def batch_streams(data: Examples, batch_size: int, rng: Streams) -> list[Iterator[Tensor]]:
    """Of each client. Groups with equal data see equal batches."""
    counts = data.counts.tolist()
    return [shuffled(g, n, batch_size) for g, n in zip(rng.generators("batches"), counts, strict=True)]


def shuffled(generator: torch.Generator, count: int, batch_size: int) -> Iterator[Tensor]:
    """Row numbers of one batch after another, reshuffled each epoch; the last batch of an epoch may be short."""
    while count:
        yield from torch.randperm(count, generator=generator).split(batch_size)


def take(data: Examples, s: int, index: Tensor, noise: Tensors) -> Batch:
    extra = {name: tensor[s, index] for name, tensor in data.extra.items()}
    return Batch(data.x[s, index], data.y[s, index], extra | noise, training=True)


def take_many(data: Examples, rows: list[int], indices: list[Tensor], noise: list[Tensors]) -> tuple[Batch, Tensor]:
    """The batches of several clients, padded to the longest, and which rows are real."""
    longest = max(len(index) for index in indices)
    index_RB = pad_rows(indices, longest)
    real_RB = torch.arange(longest) < torch.tensor([len(index) for index in indices])[:, None]
    device = data.y.device
    # One index over the rows of all clients: copies whole rows, several times faster than two indices.
    flat_RB = to_device(index_RB + data.y.shape[1] * torch.tensor(rows)[:, None], device)

    def rows_of(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, flat_RB.flatten()).view(*flat_RB.shape, *tensor.shape[2:])

    extra = {name: rows_of(tensor) for name, tensor in data.extra.items()}
    drawn = {name: pad_rows([draw[name] for draw in noise], longest) for name in (noise[0] if noise else {})}
    batch = Batch(rows_of(data.x), rows_of(data.y), extra | to_device(drawn, device), training=True)
    return batch, to_device(real_RB, device)
