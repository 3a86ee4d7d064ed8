"""How clients train at one stage of an algorithm: the settings and the backend, bound once where a run is assembled.

Shape suffixes: S clients of a cohort, C classes.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.core_types import ClientData, Examples, Tensors, Tree
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Task
from fedmoe.streams import Streams
from fedmoe.training import inference
from fedmoe.training.backends import Backend
from fedmoe.training.batch import Loss
from fedmoe.training.class_weights import ClassWeightedLoss
from fedmoe.training.classifier import LOGIT_OFFSET, ClassifierLoss, MixtureLoss
from fedmoe.training.corrections import Proximal
from fedmoe.training.devices import CPU
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Fitted, Group
from fedmoe.training.settings import LocalTraining


class LocalTrainer(NamedTuple):
    """What algorithms train with. They never name a backend: whoever assembles the run has chosen it."""

    settings: LocalTraining
    backend: Backend
    rounds: int = 1  # of the run, for a learning rate that changes over them
    class_weights: tuple[float, ...] | None = None  # what an example of each class counts; None: all alike
    task: Task = CLASSIFICATION
    device: torch.device = CPU  # where the batched backend computes; what it is given and returns is on the CPU

    def with_settings(self, **changes: Any) -> "LocalTrainer":
        """The same with some fields of `LocalTraining` changed."""
        return self._replace(settings=replace(self.settings, **changes))

    def group(self, params_S: Tree, loss: Loss, data: Examples, **options: Any) -> Group:
        """A group with the optimizer, its rates, the augmentation and the limit to gradients of these settings;
        `options` are further fields of it."""
        of_settings = {
            "augmentation": self.settings.augmentation,
            "max_gradient_norm": self.settings.max_gradient_norm,
            "rates": self.settings.rates(self.rounds),
        }
        return Group(params_S, self._weighted(loss), data, self.settings.make_optimizer(), **of_settings | options)

    def _weighted(self, loss: Loss) -> Loss:
        return loss if self.class_weights is None else ClassWeightedLoss(loss, self.class_weights)

    def loss(self, network: Network) -> ClassifierLoss:
        """Of the group named "model", as the task has it."""
        return ClassifierLoss(network, self.task)

    def mixture_loss(self, expert: Network, gate: Network, *, first: str, second: str) -> MixtureLoss:
        """Of the group named "mixture": a gate over two experts."""
        return MixtureLoss(expert, gate, first, second, self.task)

    def early_stopping(self, loss: Loss, data: Examples) -> EarlyStopping:
        return EarlyStopping(self._weighted(loss), data, self.settings.patience, self.settings.check_every)

    def fit(
        self, groups: Mapping[str, Group], rng: Streams, frozen: Tree = None, stopping: EarlyStopping | None = None
    ) -> Fitted:
        return fit(groups, self.settings.schedule, rng, self.backend, frozen, stopping, self.device)

    def summed_rates(self, steps_S: Tensor, rng: Streams) -> Tensor:
        """(S,): the learning rates of so many steps together; what plain SGD moves by, were every gradient 1."""
        rates = self.settings.rates(self.rounds)
        if rates is None:
            return steps_S * self.settings.learning_rate
        shares = [rates.shares(rng.round if rng.in_rounds else None, steps).sum() for steps in steps_S.tolist()]
        return torch.stack(shares).to(torch.get_default_dtype()) * self.settings.learning_rate

    def train_classifier(
        self,
        network: Network,
        params_S: Tensors,
        data: ClientData,
        rng: Streams,
        *,
        stop_early: bool,
        proximal: Proximal | None = None,
        gradient_offset: Tree | None = None,
        logit_offset_SC: Tensor | None = None,
        score_offset: str | None = None,
        trained_names: Collection[str] | None = None,
    ) -> Fitted:
        """On all of the clients' `data.train`; with `stop_early` the best copy by loss on `data.validation`.

        For the last five see `fit.Group` and `classifier.ClassifierLoss`. The weights are `params["model"]`.
        """
        loss = ClassifierLoss(network, self.task, score_offset)
        trained = None if trained_names is None else frozenset(trained_names)
        options = {"proximal": proximal, "gradient_offset": gradient_offset, "trained_names": trained}
        group = self.group(params_S, loss, data.train, **options)
        stopping = self.early_stopping(loss, data.validation) if stop_early else None
        return self.fit({"model": group}, rng, _offset(logit_offset_SC), stopping)

    def train_mixture(self, start_S: Tree, loss: Loss, data: ClientData, rng: Streams, frozen: Tree = None) -> Tree:
        """Train the parts of a mixture (experts, gate) together by one optimizer, with early stopping."""
        group, stopping = self.group(start_S, loss, data.train), self.early_stopping(loss, data.validation)
        return self.fit({"mixture": group}, rng, frozen, stopping).params["mixture"]

    def per_example(self, function: inference.PerExample, tree_S: Tree, examples: Examples) -> Tensor:
        """``function(tree, batch) -> (B, ...)`` for every client and example, without gradients: (S, N, ...)."""
        return inference.per_example(function, tree_S, examples, self.backend, self.device)

    def mean_loss(
        self, network: Network, params_S: Tensors, examples: Examples, logit_offset_SC: Tensor | None = None
    ) -> Tensor:
        """(S,): mean loss per client; NaN where a client has no examples."""
        loss, tree_S = self.loss(network), (params_S, _offset(logit_offset_SC))
        losses_SN = self.per_example(lambda tree, batch: loss({"model": tree[0]}, tree[1], batch), tree_S, examples)
        return torch.where(examples.counts > 0, losses_SN.sum(1) / examples.counts, torch.nan)


def _offset(logit_offset_SC: Tensor | None) -> Tensors:
    return {} if logit_offset_SC is None else {LOGIT_OFFSET: logit_offset_SC}
