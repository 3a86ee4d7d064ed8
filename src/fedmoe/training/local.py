"""Training one classifier on a client's own data: what every algorithm here does at some stage."""

import torch
from torch import Tensor

from fedmoe.core_types import ClientData, Examples, Tensors, Tree
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import Fitted, Group, fit
from fedmoe.training.inference import Backend, Loss, per_example
from fedmoe.training.settings import LocalTraining


def train_classifier(
    network: Network,
    params_S: Tensors,
    data: ClientData,
    plan: LocalTraining,
    rng: Streams,
    backend: Backend,
    *,
    stop_early: bool,
) -> Fitted:
    """All of the client's `data.train`; with `stop_early` the best copy by loss on `data.validation`."""
    losses = ClassifierLoss(network)
    group = Group(params_S, losses, data.train, plan.make_optimizer(), augmentation=plan.augmentation)
    groups = {"model": group}
    stopping = EarlyStopping(losses, data.validation, plan.patience, plan.check_every) if stop_early else None
    return fit(groups, plan.schedule, rng, backend, stopping=stopping)


def train_mixture(
    start_S: Tree,
    losses: Loss,
    data: ClientData,
    plan: LocalTraining,
    rng: Streams,
    backend: Backend,
    frozen: Tree = None,
) -> Tree:
    """Train the parts of a mixture (experts, gate) together by one optimizer, with early stopping."""
    group = Group(start_S, losses, data.train, plan.make_optimizer(), augmentation=plan.augmentation)
    stopping = EarlyStopping(losses, data.validation, plan.patience, plan.check_every)
    return fit({"mixture": group}, plan.schedule, rng, backend, frozen, stopping).params["mixture"]


def mean_loss(network: Network, params_S: Tensors, examples: Examples, backend: Backend) -> Tensor:
    """(S,): mean cross-entropy per client; NaN where a client has no examples."""

    losses = ClassifierLoss(network)
    total_S: Tensor = per_example(
        lambda params, batch: losses({"model": params}, {}, batch), params_S, examples, backend
    ).sum(1)
    return torch.where(examples.counts > 0, total_S / examples.counts, torch.nan)
