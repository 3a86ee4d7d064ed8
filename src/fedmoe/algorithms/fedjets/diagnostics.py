"""How well a router chooses: by the clients' choices in a round, and by labels of scored examples.

Shape suffixes: those of `models.router`.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.core_types import ClientId, Examples, Tensors
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.network import Network
from fedmoe.models.router import best_held, confidence, log_scores
from fedmoe.training.batch import Batch
from fedmoe.training.inference import CHUNK
from fedmoe.training.routed_experts import log_probs_of


class TrainedExperts(Protocol):
    """An update: the experts that a client trained, in the order of its choice."""

    @property
    def experts(self) -> Tensors: ...
    @property
    def expert_ids(self) -> Tensor: ...
    @property
    def num_examples(self) -> Tensor: ...


class HeldExperts(Protocol):
    """What a client holds when it is scored."""

    @property
    def experts(self) -> Tensors: ...
    @property
    def expert_ids(self) -> Tensor: ...
    @property
    def router(self) -> Tensors: ...


def observe_choices(
    before_M: Tensors, updates: Mapping[ClientId, TrainedExperts], anchors: Collection[ClientId]
) -> Observation:
    """A client's examples count for each expert that it trained; anchors have no choice."""
    count = len(next(iter(before_M.values())))
    sent = {client: ExpertSubset(update.experts, update.expert_ids) for client, update in updates.items()}
    mass = {
        client: torch.zeros(count).index_fill(0, update.expert_ids, float(update.num_examples))
        for client, update in updates.items()
    }
    observed = observe_experts(before_M, sent, mass)
    firsts = [int(update.expert_ids[0]) for client, update in updates.items() if client not in anchors]
    if not firsts:
        return observed
    return observed._replace(first_choice_K=torch.bincount(torch.tensor(firsts), minlength=count) / len(firsts))


def measured(num_experts: int, common: CommonExpert) -> tuple[str, ...]:
    """Names with a colon are details: stored, but no column of a table."""
    beside = ("common_accuracy",) if common.can_predict else ()
    return ("right_choice", "confidence", *beside, *(f"expert_accuracy:{m}" for m in range(num_experts)))


def measure(
    expert: Network,
    router: Network,
    common: CommonExpert,
    shared: HeldExperts,
    usable_H: Tensor | None,
    rows: Examples,
) -> dict[str, Any]:
    """Means over the examples; the accuracy of an expert that the client does not use is not defined.

    A choice is right where the chosen expert's answer is, or where none of the usable experts has the right one.
    """
    usable = torch.ones(len(shared.expert_ids), dtype=torch.bool) if usable_H is None else usable_H
    held = shared.expert_ids[usable]
    experts = {name: leaf[usable] for name, leaf in shared.experts.items()}
    rights, choices, sure, common_rights = [], [], [], []
    with torch.no_grad():
        for x, y in zip(rows.x.split(CHUNK), rows.y.split(CHUNK), strict=True):
            common_answer_B, embedding_BF = common.answers_and_embedding(x)
            log_scores_BM = log_scores(router, shared.router, embedding_BF)
            rights.append((log_probs_of(expert, experts, Batch(x, y, {})).argmax(-1) == y).T)
            choices.append(best_held(log_scores_BM, held))
            sure.append(confidence(log_scores_BM, held))
            if common_answer_B is not None:
                common_rights.append(common_answer_B == y)
    right_BH, choice_B = torch.cat(rights), torch.cat(choices)
    chosen_right_B = right_BH.gather(1, choice_B[:, None])[:, 0]
    count = len(shared.router["second.bias"])
    by_expert = dict(zip(held.tolist(), right_BH.double().mean(0).tolist(), strict=True))
    return {
        "right_choice": (chosen_right_B | ~right_BH.any(1)).double().mean(),
        "confidence": torch.cat(sure).double().mean(),
        **({"common_accuracy": torch.cat(common_rights).double().mean()} if common_rights else {}),
        **{f"expert_accuracy:{m}": by_expert.get(m, torch.nan) for m in range(count)},
    }
