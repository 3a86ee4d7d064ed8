"""kNN-Per (Marfoq et al. 2022): the global model, and beside it what a client remembers of its own examples.

FedAvg trains one model. After the rounds each client stores the representation that this model, frozen, gives to each
of its own training examples, opted in or out, and the label. A prediction mixes the model's probabilities with those
that the nearest stored examples vote for: lambda kNN + (1 - lambda) model. Each client chooses its lambda on its own
validation examples, by their loss; without any, or without training examples, it is 0 and the model alone predicts. The
datastore never leaves the client.
Shape suffixes: B examples, N stored examples, K neighbours, F features, C classes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.fedrod import GENERIC, require_output_layer, with_features
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples
from fedmoe.models.mixture import negative_log_likelihood, shares_of_two
from fedmoe.training.inference import clients_of

# lambda = 1 is left out: a label that no neighbour has would have probability 0, and an infinite loss.
SHARES = tuple(tenths / 10 for tenths in range(10))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class KnnPerConfig(FedAvgConfig):
    """Ten neighbours and a Gaussian kernel of scale 1, as in the authors' code (github.com/omarfoq/knn-per)."""

    num_neighbors: PositiveInt = 10  # K; fewer for a client that has fewer examples
    scale: PositiveFloat = 1.0  # of the kernel exp(-|a - b|^2 / (F scale))


class PersonalState(NamedTuple):
    features: Tensor  # (N, F)
    labels: Tensor  # (N,)
    share: Tensor  # lambda: of the neighbours' vote


def knn_per(config: KnnPerConfig, setup: AlgorithmSetup) -> Algorithm:
    require_output_layer(setup)
    return fedavg(config, setup)._replace(
        no_regression="its neighbours vote for classes",
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, _rng: memorize(config, setup, b, data),
        predict=lambda b, _client, personal, x: predict(config, setup, b, personal, x),
        expert_weights=lambda _b, _c, personal, x: shares_of_two(
            personal.share.expand(x.shape[0]), "neighbors", "model"
        ),
    )


def memorize(config: KnnPerConfig, setup: AlgorithmSetup, shared: Broadcast, data: ClientData) -> list[PersonalState]:
    """A datastore for each client, as long as its training data."""
    read = data.map(lambda part: with_features(setup, shared, part))
    stores = [PersonalState(own.x, own.y, torch.zeros(())) for own in clients_of(read.train)]
    validation = clients_of(read.validation)
    return [s._replace(share=best_share(config, s, own)) for s, own in zip(stores, validation, strict=True)]


def best_share(config: KnnPerConfig, store: PersonalState, validation: Examples) -> Tensor:
    """The lambda with the lowest mean loss on a client's validation examples, which hold features in place of x."""
    if not len(store.labels) or not len(validation.y):
        return torch.zeros(())
    model_BC = F.log_softmax(validation.extra[GENERIC], dim=-1)
    neighbors_BC = log_vote(config, store, validation.x, model_BC.shape[-1])
    shares = torch.tensor(SHARES)
    losses = [
        negative_log_likelihood(log_interpolate(one, neighbors_BC, model_BC), validation.y).mean() for one in shares
    ]
    return shares[torch.stack(losses).argmin()]


def log_vote(config: KnnPerConfig, store: PersonalState, features_BF: Tensor, num_classes: int) -> Tensor:
    """log-probabilities (B, C) by the nearest stored examples, each weighted by the kernel; -inf for other labels."""
    distances_BN = torch.cdist(features_BF, store.features, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances_BN.topk(min(config.num_neighbors, len(store.labels)), largest=False)
    weights_BK = F.softmax(-nearest.values / (features_BF.shape[1] * config.scale), dim=-1)
    votes_BC = torch.zeros(features_BF.shape[0], num_classes).scatter_add(1, store.labels[nearest.indices], weights_BK)
    return votes_BC.log()


def log_interpolate(share: Tensor, neighbors_BC: Tensor, model_BC: Tensor) -> Tensor:
    """log(lambda kNN + (1 - lambda) model); exactly the model where lambda is 0."""
    return torch.logaddexp(share.log() + neighbors_BC, torch.log1p(-share) + model_BC)


def predict(
    config: KnnPerConfig, setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState | None, x: Tensor
) -> Tensor:
    if personal is None or personal.share == 0:
        return F.log_softmax(setup.expert(shared.model, x), dim=-1)
    scores_BC, features_BF = setup.expert.with_features(shared.model, x)
    neighbors_BC = log_vote(config, personal, features_BF, scores_BC.shape[-1])
    return log_interpolate(personal.share, neighbors_BC, F.log_softmax(scores_BC, dim=-1))
