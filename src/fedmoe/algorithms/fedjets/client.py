"""A FedJETs client: it chooses experts by its inputs, trains them with the router, and is answered by the best of them.

Shape suffixes: those of `models.router`, K chosen experts, C classes.
"""

import torch
from torch import Tensor

from fedmoe.algorithms.algorithm import NoReport
from fedmoe.algorithms.fedavg import TrainingReport
from fedmoe.algorithms.fedjets.states import Choice, ClientState, ExpertsDown, Parts, PersonalState, RouterDown, Trained
from fedmoe.core_types import ClientData, Tensors
from fedmoe.models.router import best_held, log_scores, mean_scores, top_experts
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.group import Group
from fedmoe.training.optimizers import Sgd
from fedmoe.training.routed_experts import EMBEDDING, log_probs_of, train_routed


def scores_of_clients(parts: Parts, router_S: Tensors, data: ClientData) -> Tensor:
    """(S, M): the router's scores, summed over a client's inputs. Labels are not there to be read."""

    def scores(router: Tensors, batch: Batch) -> Tensor:
        return log_scores(parts.router, router, batch.extra[EMBEDDING]).exp()

    return mean_scores(parts.setup.federated.per_example(scores, router_S, data.inputs), data.inputs.counts)


def choose_experts(parts: Parts, shared: RouterDown, data: ClientData) -> tuple[ClientState, Choice, NoReport]:
    chosen_SK = top_experts(scores_of_clients(parts, shared.router, data), parts.config.num_sent)
    return ClientState(shared.router), Choice(chosen_SK), NoReport()


def local_update(
    parts: Parts, shared: ExpertsDown, client: ClientState, data: ClientData, rng: Streams
) -> tuple[ClientState, Trained, TrainingReport]:
    """Only anchors are sent the router with the experts: all others have it from their choice."""
    if shared.router:
        return train_anchor(parts, shared, data, rng)
    trainer, train = parts.setup.federated, data.train
    fitted = train_routed(parts.loss, trainer, shared.experts, shared.expert_ids, client.router, train, rng)
    num_examples_S = train.counts.to(torch.float32)
    update = Trained(fitted.params["experts"], shared.expert_ids, fitted.params["router"], num_examples_S)
    return client, update, TrainingReport(fitted.loss_S)


def train_anchor(
    parts: Parts, shared: ExpertsDown, data: ClientData, rng: Streams
) -> tuple[ClientState, Trained, TrainingReport]:
    """Two independent losses: the expert's own on the anchor's data, and the router's for naming that expert."""
    trainer, train = parts.setup.federated, data.train
    alone = {name: leaf[:, 0] for name, leaf in shared.experts.items()}
    fitted = trainer.train_classifier(parts.setup.expert, alone, data, rng, stop_early=False)
    named = train._replace(x=train.extra[EMBEDDING], y=shared.expert_ids.expand_as(train.y).contiguous(), extra={})
    naming = Group(shared.router, ClassifierLoss(parts.router), named, Sgd(parts.config.router_rate))
    router_S = trainer.fit({"model": naming}, rng).params["model"]
    experts = {name: leaf[:, None] for name, leaf in fitted.params["model"].items()}
    update = Trained(experts, shared.expert_ids, router_S, train.counts.to(torch.float32))
    return ClientState(shared.router), update, TrainingReport(fitted.loss_S)


def choose_alone(parts: Parts, shared: ExpertsDown, data: ClientData) -> PersonalState:
    """On all of the client's inputs, among the experts that it holds; nothing is sent."""
    scores_SH = scores_of_clients(parts, shared.router, data).gather(1, shared.expert_ids)
    best_SK = top_experts(scores_SH, parts.config.num_sent)
    return PersonalState(torch.zeros(scores_SH.shape, dtype=torch.bool).scatter(1, best_SK, True))


def predict(parts: Parts, shared: ExpertsDown, personal: PersonalState | None, x: Tensor) -> Tensor:
    """(B, C): each example is answered by its best-scoring expert among the K."""
    place_B = answering(parts, shared, personal, x)
    log_probs_HBC = log_probs_of(parts.setup.expert, shared.experts, Batch(x, x.new_zeros(x.shape[0]), {}))
    at_1BC = place_B[None, :, None].expand(1, -1, log_probs_HBC.shape[-1])
    return log_probs_HBC.gather(0, at_1BC)[0]


def answering(parts: Parts, shared: ExpertsDown, personal: PersonalState | None, x: Tensor) -> Tensor:
    """(B,): which of the experts held answers each example."""
    log_scores_BM = log_scores(parts.router, shared.router, parts.common.embed(x))
    return best_held(log_scores_BM, shared.expert_ids, None if personal is None else personal.usable)


def expert_weights(parts: Parts, shared: ExpertsDown, personal: PersonalState | None, x: Tensor) -> Tensors:
    """All to the expert that answers."""
    place_B = answering(parts, shared, personal, x)
    return {f"expert {m}": (place_B == h).float() for h, m in enumerate(shared.expert_ids.tolist())}
