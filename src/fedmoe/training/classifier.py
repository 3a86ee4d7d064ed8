"""The losses that nearly every stage trains with: of a network, and of a mixture of two experts, for any task.

Types of their own, so that they can tell the trainer how the native kernels take a whole epoch of them.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Classification, Task
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.kernel_spec import KernelSpec

LOGIT_OFFSET = "logit_offset"
NO_KERNEL = "the kernels know cross-entropy alone, and this is a regression"


@dataclass(frozen=True)
class ClassifierLoss:
    """One loss per example for the group named "model": cross-entropy, or another task's.

    The frozen part "logit_offset" (S, C), where there is one, is added to each client's scores: the log-frequencies of
    its labels, or an output bias of its own. So is what the examples carry under the name `score_offset` (N, C): the
    scores of another model, which is not trained.
    """

    network: Network
    task: Task = CLASSIFICATION
    score_offset: str | None = None

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        scores_BC = self.network(trainable["model"], batch.x, training=batch.training)
        if self.score_offset is not None:
            scores_BC = scores_BC + batch.extra[self.score_offset]
        if LOGIT_OFFSET in frozen:
            scores_BC = scores_BC + frozen[LOGIT_OFFSET]
        return self.task.losses(self.task.prediction(scores_BC), batch.y)

    def cohort(self, trainable_S: Trainable, frozen_S: Tree, batches: Batch) -> Tensor:
        """The same for all clients of a cohort at once, (S, B), where the network reads cohorts."""
        scores_SBC = self.network.cohort(trainable_S["model"], batches.x)
        if self.score_offset is not None:
            scores_SBC = scores_SBC + batches.extra[self.score_offset]
        return self.of_scores(scores_SBC, frozen_S, batches.y)

    def of_scores(self, scores_SBC: Tensor, frozen_S: Tree, y_SB: Tensor) -> Tensor:
        """(S, B): of what the network says of a cohort's examples."""
        if LOGIT_OFFSET in frozen_S:
            scores_SBC = scores_SBC + frozen_S[LOGIT_OFFSET].unsqueeze(1)
        return self.task.losses(self.task.prediction(scores_SBC), y_SB)

    def kernel_spec(self, _params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str:
        if not isinstance(self.task, Classification):
            return NO_KERNEL
        of_examples = None if self.score_offset is None else data.extra[self.score_offset]
        return KernelSpec({"": self.network}, logit_offset_SC=frozen_S.get(LOGIT_OFFSET), score_offset_SNC=of_examples)


@dataclass(frozen=True)
class MixtureLoss:
    """Of h first + (1 - h) second, for the group named "mixture" with its parts by name.

    A classifier's is -log of that mixture of probabilities at the label. The second expert is trained too where the
    group has a part of its name. Else it is frozen: its predictions come with the examples, in `batch.extra`, or its
    weights are given. The frozen part "logit_offset", where there is one, is added to the first expert's scores.
    """

    expert: Network
    gate: Network
    first: str
    second: str
    task: Task = CLASSIFICATION

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        own = trainable["mixture"]
        gate_B1 = self.gate(own["gate"], batch.x, training=batch.training)
        first_BC = predictions(self.task, self.expert, own[self.first], batch)
        if LOGIT_OFFSET in frozen:
            first_BC = F.log_softmax(first_BC + frozen[LOGIT_OFFSET], dim=-1)
        if self.second in own:
            second_BC = predictions(self.task, self.expert, own[self.second], batch)
        elif self.second in batch.extra:
            second_BC = batch.extra[self.second]
        else:
            second_BC = self.task.prediction(self.expert(frozen, batch.x))
        return self.task.losses(self.task.mix(gate_B1, first_BC, second_BC), batch.y)

    def kernel_spec(self, params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str:
        if not isinstance(self.task, Classification):
            return NO_KERNEL
        networks = {f"{self.first}/": self.expert, "gate/": self.gate}
        offset_SC = frozen_S.get(LOGIT_OFFSET)
        if self.second in params_S:
            return KernelSpec({**networks, f"{self.second}/": self.expert}, logit_offset_SC=offset_SC)
        if self.second not in data.extra:
            return f"the frozen expert {self.second!r} is evaluated anew on every batch"
        return KernelSpec(networks, second_SNC=data.extra[self.second], logit_offset_SC=offset_SC)


def predictions(task: Task, network: Network, params: Tensors, batch: Batch) -> Tensor:
    return task.prediction(network(params, batch.x, training=batch.training))


def log_probs(network: Network, params: Tensors, batch: Batch) -> Tensor:
    return F.log_softmax(network(params, batch.x, training=batch.training), dim=-1)
