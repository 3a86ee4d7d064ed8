"""The FedMix variant that Dun et al. (2023) compare FedJETs with: its gate reads the common expert's embeddings.

All M experts go to every client of a round, which trains them and the gate together on the likelihood of the mixture
(eq. 3 of Reisser et al. 2021); both are averaged over the clients, and a prediction is the mixture of all experts. The
gate is shared, since a new client without labels has none of its own. So it is FedJETs with K = M, without anchors,
that mixes instead of choosing; from scratch, or from the common expert with `model.start_from`.
Shape suffixes: those of `models.router`, C classes.
"""

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Exchange, Nothing, uniform_sample
from fedmoe.algorithms.fedavg import TrainingReport
from fedmoe.algorithms.fedjets.algorithm import aggregate, experts_rejection, init_server
from fedmoe.algorithms.fedjets.diagnostics import measure, measured, observe_choices
from fedmoe.algorithms.fedjets.states import (
    ExpertsDown,
    FedJetsConfig,
    Parts,
    ServerState,
    Trained,
    build_router,
    require_common,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.models.expert_mixture import log_mixture
from fedmoe.models.router import log_scores
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.routed_experts import EMBEDDING, log_probs_of, train_routed


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedMixCommonConfig:
    """Two experts, as in Table 1 there; the gate is FedJETs' router."""

    num_experts: PositiveInt = 2  # M
    router_hidden: PositiveInt = 64
    router_rate: PositiveFloat = 0.001
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report


def fedmix_common(config: FedMixCommonConfig, setup: AlgorithmSetup) -> Algorithm:
    as_fedjets = FedJetsConfig(
        config.num_experts, config.num_experts, config.router_hidden, config.router_rate, config.max_weight
    )
    common = require_common(setup, "fedmix_common")
    router = build_router(setup, common, config.num_experts, config.router_hidden)
    parts = Parts(as_fedjets, setup, common, router, {})
    everything = torch.arange(config.num_experts)
    train = Exchange(
        name="train",
        broadcast=lambda server, _client, _replies: ExpertsDown(server.experts, everything, server.router),
        local_update=lambda b, client, data, rng: local_update(parts, b, client, data, rng),
        aggregate=lambda server, updates, *_: aggregate(as_fedjets, server, updates),
        update_like=lambda b: Trained(b.experts, b.expert_ids, b.router, torch.zeros(())),
        rejection=experts_rejection,
        broadcast_type=ExpertsDown,
        update_type=Trained,
        report_type=TrainingReport,
        observe=lambda before, _after, updates, *_: observe_choices(before.experts, updates, updates.keys()),
    )
    return Algorithm(
        server_type=ServerState,
        init_server=lambda seed: init_server(parts, seed),
        round=(train,),
        delivery=(train._replace(name="deliver"),),
        predict=lambda b, _client, _personal, x: predict(parts, b, x),
        sample=uniform_sample(setup.clients_per_round),
        expert_weights=lambda b, _client, _personal, x: expert_weights(parts, b, x),
        constants=common.constants,
        frequencies="pool",
        no_regression="its gate weighs probabilities of classes",
        once_of_examples={EMBEDDING: common.embed},
        measure=lambda b, _client, _personal, rows: measure(setup.expert, router, common, b, None, rows),
        measured=measured(config.num_experts, common),
    )


def local_update(
    parts: Parts, shared: ExpertsDown, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Trained, TrainingReport]:
    trainer, train = parts.setup.federated, data.train
    fitted = train_routed(parts.loss, trainer, shared.experts, shared.expert_ids, shared.router, train, rng)
    num_examples_S = train.counts.to(torch.float32)
    update = Trained(fitted.params["experts"], shared.expert_ids, fitted.params["router"], num_examples_S)
    return client, update, TrainingReport(fitted.loss_S)


def predict(parts: Parts, shared: ExpertsDown, x: Tensor) -> Tensor:
    """(B, C): the mixture of all experts."""
    log_gate_BM = log_scores(parts.router, shared.router, parts.common.embed(x))
    batch = Batch(x, x.new_zeros(x.shape[0]), {})
    return log_mixture(log_gate_BM, log_probs_of(parts.setup.expert, shared.experts, batch))


def expert_weights(parts: Parts, shared: ExpertsDown, x: Tensor) -> Tensors:
    gate_MB = log_scores(parts.router, shared.router, parts.common.embed(x)).exp().T
    return {f"expert {m}": gate_B for m, gate_B in enumerate(gate_MB)}
