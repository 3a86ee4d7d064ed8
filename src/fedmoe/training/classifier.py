"""Cross-entropy of a network: the loss that nearly every stage trains with.

A type of its own, so that the trainer sees that a group is this and nothing else, and can hand the native kernels a
whole epoch of it.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedmoe.models.mixture import negative_log_likelihood
from fedmoe.models.network import Network
from fedmoe.training.inference import Batch
from fedmoe.vocabulary import Tensors, Tree


@dataclass(frozen=True)
class ClassifierLoss:
    """One loss per example for the group named "model"."""

    network: Network

    def __call__(self, trainable: dict[str, Tree], _frozen: Tree, batch: Batch) -> Tensor:
        return negative_log_likelihood(log_probs(self.network, trainable["model"], batch), batch.y)

    def cohort(self, trainable_S: dict[str, Tree], _frozen: Tree, batches: Batch) -> Tensor:
        """The same for all clients of a cohort at once, (S, B), where the network reads cohorts."""
        log_probs_SBC = F.log_softmax(self.network.cohort(trainable_S["model"], batches.x), dim=-1)
        return -log_probs_SBC.gather(-1, batches.y.unsqueeze(-1)).squeeze(-1)


def log_probs(network: Network, params: Tensors, batch: Batch) -> Tensor:
    return F.log_softmax(network(params, batch.x, training=batch.training), dim=-1)
