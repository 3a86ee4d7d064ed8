"""The new client of Reisser et al. 2021 (Appendix F): no data of its own, asked about everyone's validation examples.

It is one more unseen client. It receives what an unseen client receives, personalises on nothing, and its test data are
a sample of the opted-in validation examples of all clients that take part.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from fedmoe import trees
from fedmoe.clients.federation import ClientDataset, Federation, keep, take
from fedmoe.core_types import ClientId, Examples
from fedmoe.errors import DataError
from fedmoe.streams import numpy_stream, torch_stream

# More than the sample needs, few enough that cost does not follow the population.
MOST_CLIENTS = 500


def with_pooled_client(federation: Federation, most_examples: int, seed: int) -> Federation:
    new_client = federation.num_clients + federation.num_unseen
    if not any(bool(federation.load(int(client)).validation_opted_in.any()) for client in federation.participants):
        raise DataError(
            f"evaluation.pooled={most_examples}, but no client that takes part has an opted-in validation example. "
            "Give clients validation data, or leave evaluation.pooled away."
        )

    class Everyone:
        """Read when it is scored: nothing else needs it."""

        def __init__(self) -> None:
            empty = torch.zeros(0, dtype=torch.int64)
            self.train = self.validation = take(federation.load(0).train, empty)
            self.train_opted_in = self.validation_opted_in = torch.zeros(0, dtype=torch.bool)
            self.unlabelled: Examples | None = None

        @cached_property
        def test(self) -> Examples:
            return pooled_validation(federation, most_examples, seed)

    def load(client: ClientId) -> ClientDataset:
        return Everyone() if client == new_client else federation.load(client)

    names = None if federation.names is None else [*federation.names, "everyone's validation examples"]
    return replace(federation, num_unseen=federation.num_unseen + 1, load=load, names=names, pooled=new_client)


def pooled_validation(federation: Federation, most_examples: int, seed: int) -> Examples:
    """A draw without replacement; with many clients, from those of a draw of them."""
    clients = federation.participants
    if len(clients) > MOST_CLIENTS:
        rng = numpy_stream(seed, "union", "clients")
        clients = np.sort(rng.choice(clients, MOST_CLIENTS, replace=False))
    held = [federation.load(int(client)) for client in clients]
    parts = [keep(one.validation, one.validation_opted_in)._replace(counts=torch.zeros(1)) for one in held]
    together = trees.tree_map(lambda *leaf: torch.cat(leaf), parts[0], *parts[1:])
    order = torch.randperm(len(together.y), generator=torch_stream(seed, "union", "examples"))
    return take(together, order[:most_examples].sort().values)
