"""How a client trains: the settings of one call of the trainer."""

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe.setting_types import NonNegativeFloat, PositiveFloat, PositiveInt
from fedmoe.training.augment import AUGMENTATIONS, Augmentation, Name
from fedmoe.training.group import Schedule
from fedmoe.training.optimizers import Adam, Optimizer, Sgd
from fedmoe.training.rates import Rates, RateSchedule


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LocalTraining:
    """`patience` checks without a better validation loss stop a client; it counts only where a method stops early."""

    epochs: PositiveInt = 1
    batch_size: PositiveInt = 10
    learning_rate: PositiveFloat = 1e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: NonNegativeFloat = 0.0  # of SGD
    weight_decay: NonNegativeFloat = 0.0  # as torch.optim: part of the gradient, but for adamw
    max_gradient_norm: PositiveFloat | None = None  # of a client's whole gradient; a longer one is scaled down
    steps: PositiveInt | None = None
    patience: PositiveInt = 20
    check_every: PositiveInt = 1  # epochs between checks of the validation loss
    augment: Name | None = None  # images only
    rate_over_rounds: RateSchedule | None = None  # of the learning rate; in the rounds only
    rate_over_steps: RateSchedule | None = None  # over the local steps of each call

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.batch_size, self.epochs, self.steps)

    @property
    def augmentation(self) -> Augmentation | None:
        return AUGMENTATIONS[self.augment] if self.augment else None

    def rates(self, rounds: int) -> Rates | None:
        """For a run of so many rounds; None for a constant rate."""
        schedules = (self.rate_over_rounds, self.rate_over_steps)
        return None if schedules == (None, None) else Rates(*schedules, rounds)

    def make_optimizer(self) -> Optimizer:
        if self.optimizer == "sgd":
            return Sgd(self.learning_rate, self.momentum, self.weight_decay)
        return Adam(self.learning_rate, weight_decay=self.weight_decay, decoupled=self.optimizer == "adamw")
