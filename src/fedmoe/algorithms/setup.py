"""What a run gives to an algorithm's factory."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.core_types import ClientId, Tensors
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Task
from fedmoe.training.local import LocalTrainer


class AlgorithmSetup(NamedTuple):
    """The models, how clients train, how many take part, and what is known of the federation."""

    expert: Network
    gate: Network
    federated: LocalTrainer  # in the rounds
    local: LocalTrainer  # from a fresh start, on the client alone
    personal: LocalTrainer  # after the rounds
    clients_per_round: int | None  # None: everyone who opted in
    num_clients: int = 0
    num_participants: int = 0  # clients that opted in and may be sampled
    num_classes: int = 0  # 0 in a regression
    target_shape: tuple[int, ...] | None = None  # of an example's target in a regression, None for classes
    input_shape: tuple[int, ...] = ()  # of one example
    unlabelled_new_clients: tuple[ClientId, ...] = ()  # unseen clients without any training example
    release: bool = False  # whether clients will be asked for the private parts that an algorithm declares for release
    # Side information that every training and validation example has in `extra`, and how many values: 0 … that - 1.
    side_values: Mapping[str, int] = {}
    anchors: tuple[ClientId, ...] = ()  # of the schedule; they are drawn beside `clients_per_round` others
    common: CommonExpert | None = None  # the section [common_expert]
    task: Task = CLASSIFICATION

    def predict(self, params: Tensors, x: Tensor) -> Tensor:
        """What an expert with these weights predicts: log-probabilities, or the numbers of a regression."""
        return self.task.prediction(self.expert(params, x))


# factory(setup), or factory(config, setup) where a dataclass annotates `config`.
AlgorithmFactory = Callable[[AlgorithmSetup], Algorithm] | Callable[[Any, AlgorithmSetup], Algorithm]
