"""Fed-RoD (Chen & Chao 2022): one body, a generic head that serves everybody, and a personal head that adds to it.

Body and generic head are FedAvg's model, trained with the balanced softmax: the log-frequencies of a client's labels
are added to the scores in training and left out in prediction, so that clients with different labels pull the model the
same way. The personal head is a linear layer on the same features, whose scores are added to the generic ones. It
follows the plain cross-entropy, no gradient of it reaches what is shared, and it never leaves the client.
Where we depart from the paper: there a client trains its personal head beside the rounds. Nothing that is sent depends
on it, so here it is trained after them, from zero, on all of the client's own records, opted in or out, with early
stopping: on the body that it will be used with, and for a client that never took part too. It is the paper's linear
head; its hypernetwork, which makes heads for new clients, is not here.
Shape suffixes: S clients of a cohort, N examples, B a batch, C classes, F features.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, TrainingReport, Update, fedavg
from fedmoe.algorithms.label_priors.frequencies import label_counts
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples, Tensors
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch

SMALLEST_SHARE = 1e-6  # of a label that a client does not have: its log must be finite
GENERIC = "generic_scores"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedRodConfig(FedAvgConfig):
    """Fed-RoD has no settings beyond FedAvg's: the balanced softmax takes the label counts as they are (gamma = 1)."""


class PersonalState(NamedTuple):
    head: Tensors  # weight (C, F), bias (C,)


def fedrod(config: FedRodConfig, setup: AlgorithmSetup) -> Algorithm:
    require_output_layer(setup)
    plain = fedavg(config, setup)
    (train,) = plain.round
    return plain._replace(
        no_regression="it weighs the loss by the frequencies of labels",
        counts_labels=True,
        round=(train._replace(local_update=lambda b, c, data, rng: local_update(setup, b, c, data, rng)),),
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, rng: train_head(setup, b, data, rng),
        predict=lambda b, _client, personal, x: predict(setup, b, personal, x),
    )


def require_output_layer(setup: AlgorithmSetup) -> None:
    """A model without one has no features to read, which is said before the rounds and not after them."""
    _ = setup.expert.num_features


def head_network(setup: AlgorithmSetup) -> Network:
    num_features = setup.expert.num_features
    head = Network(lambda: nn.Linear(num_features, setup.num_classes), "head", (num_features,))
    if setup.personal.backend == "native":
        head.go_native()
    return head


def log_label_shares(examples: Examples, num_classes: int, rng: Streams | None = None) -> Tensor:
    """(S, C): the logs of the label frequencies of each client."""
    counts_SC = label_counts(examples, num_classes, rng)
    shares_SC = counts_SC / counts_SC.sum(1, keepdim=True).clamp(min=1)
    return shares_SC.clamp(min=SMALLEST_SHARE).log()


def local_update(
    setup: AlgorithmSetup, shared: Broadcast, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, TrainingReport]:
    """FedAvg's, with the balanced softmax."""
    fitted = setup.federated.train_classifier(
        setup.expert,
        shared.model,
        data,
        rng,
        stop_early=False,
        logit_offset_SC=log_label_shares(data.train, setup.num_classes, rng),
    )
    update = Update(fitted.params["model"], data.train.counts.to(torch.float32))
    return client, update, TrainingReport(fitted.loss_S)


def train_head(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    """The body is frozen, so features and generic scores are computed once, of images that are not augmented."""
    trainer, head = setup.personal.with_settings(augment=None), head_network(setup)
    cached = data.map(lambda part: with_features(setup, shared, part))
    start_S = trees.stack([trees.tree_map(torch.zeros_like, head.init(0))] * len(rng.clients))
    fitted = trainer.train_classifier(head, start_S, cached, rng, stop_early=True, score_offset=GENERIC)
    return PersonalState(fitted.params["model"])


def with_features(setup: AlgorithmSetup, shared: Broadcast, examples: Examples) -> Examples:
    """The features in place of x, and the generic scores beside them."""

    def both(model: Tensors, batch: Batch) -> Tensor:
        return torch.cat(setup.expert.with_features(model, batch.x), dim=-1)

    outputs_SN = setup.personal.per_example(both, shared.model, examples)
    scores_SNC, features_SNF = outputs_SN.split([setup.num_classes, setup.expert.num_features], dim=-1)
    return examples._replace(x=features_SNF, extra={GENERIC: scores_SNC})


def predict(setup: AlgorithmSetup, shared: Broadcast, personal: PersonalState | None, x: Tensor) -> Tensor:
    """The generic scores, and the personal head's on top of them where there is one."""
    if personal is None:
        return F.log_softmax(setup.expert(shared.model, x), dim=-1)
    scores_BC, features_BF = setup.expert.with_features(shared.model, x)
    return F.log_softmax(scores_BC + F.linear(features_BF, personal.head["weight"], personal.head["bias"]), dim=-1)
