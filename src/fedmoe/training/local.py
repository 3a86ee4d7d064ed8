"""Training one classifier on a client's own data: what every algorithm here does at some stage."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.models.mixture import negative_log_likelihood
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.fit import EarlyStopping, Fitted, Group, Loss, Trainable, fit
from fedmoe.training.inference import Batch, Way, per_example
from fedmoe.training.plan import TrainingPlan
from fedmoe.vocabulary import ClientData, Examples, Tensors, Tree


def classifier_losses(network: Network) -> Loss:
    """Cross-entropy of each example for the group named "model"."""

    def losses(trainable: Trainable, _frozen: Tree, batch: Batch) -> Tensor:
        return negative_log_likelihood(log_probs(network, trainable["model"], batch), batch.y)

    return losses


def cohort_losses(network: Network) -> Loss | None:
    """The same for all clients of a cohort at once, where the network can."""

    def losses(trainable_S: Trainable, _frozen: Tree, batches: Batch) -> Tensor:
        log_probs_SBC = F.log_softmax(network.cohort(trainable_S["model"], batches.x), dim=-1)
        return -log_probs_SBC.gather(-1, batches.y.unsqueeze(-1)).squeeze(-1)

    return losses if network.reads_cohorts else None


def log_probs(network: Network, params: Tensors, batch: Batch) -> Tensor:
    return F.log_softmax(network(params, batch.x, training=batch.training), dim=-1)


def train_classifier(
    network: Network,
    params_S: Tensors,
    data: ClientData,
    plan: TrainingPlan,
    rng: Streams,
    way: Way,
    *,
    stop_early: bool,
) -> Fitted:
    """All of the client's `data.train`; with `stop_early` the best copy by loss on `data.validation`."""
    losses = classifier_losses(network)
    group = Group(params_S, losses, data.train, plan.make_optimizer(), cohort_loss=cohort_losses(network))
    groups = {"model": group._replace(augmentation=plan.augmentation)}
    stopping = EarlyStopping(losses, data.validation, plan.patience, plan.check_every) if stop_early else None
    return fit(groups, plan.schedule, rng, way, stopping=stopping)


def train_mixture(
    start_S: Tree, losses: Loss, data: ClientData, plan: TrainingPlan, rng: Streams, way: Way, frozen: Tree = None
) -> Tree:
    """Train the parts of a mixture (experts, gate) together by one optimizer, with early stopping."""
    group = Group(start_S, losses, data.train, plan.make_optimizer(), augmentation=plan.augmentation)
    stopping = EarlyStopping(losses, data.validation, plan.patience, plan.check_every)
    return fit({"mixture": group}, plan.schedule, rng, way, frozen, stopping).params["mixture"]


def mean_loss(network: Network, params_S: Tensors, examples: Examples, way: Way) -> Tensor:
    """(S,): mean cross-entropy per client; NaN where a client has no examples."""

    def losses(params: Tensors, batch: Batch) -> Tensor:
        return negative_log_likelihood(log_probs(network, params, batch), batch.y)

    total_S: Tensor = per_example(losses, params_S, examples, way).sum(1)
    return torch.where(examples.counts > 0, total_S / examples.counts, torch.nan)
