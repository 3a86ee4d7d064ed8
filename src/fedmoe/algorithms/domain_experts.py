"""Domain experts (Peterson, Kanani and Marathe 2019): a private expert beside a shared model that may be noised.

A user predicts with alpha(x) M_G(x) + (1 - alpha(x)) M_P(x), eq. 2: M_G is learnt together, M_P starts as a copy of it
and never leaves its user, nor does the gate alpha. Algorithm 2 sends the gradient of M_G's own loss, Algorithm 1 that
of the mixed loss, which the gate weighs down where it trusts M_P. In both M_P and the gate follow the mixed loss,
without noise. The gate has a half of the records to itself, and a penalty for always preferring one expert.

One local step of plain SGD, averaged over users, is the paper's FedSGD (`training.federated` with `steps = 1` and
`optimizer = "sgd"`); more steps between exchanges are DP-FedAvg. With [privacy] the shared model's steps are noised.
The usual accounting then covers Algorithm 2 only: Algorithm 1's gradient passes through M_P and alpha, which saw the
same records without noise, so one record changes *every* gradient, and clipping each of them bounds nothing.
Records: in Algorithm 2 M_P and alpha see all records, in Algorithm 1 opted-in ones, since what is sent depends on them.
A user who never took part trains M_P and alpha after the rounds, as `training.personal` says. There is no choice of a
best round: the private parts have moved on since.
Shape suffixes: S clients of a cohort, B a batch, C classes or numbers.
"""

from typing import Literal, NamedTuple

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, TrainingReport, Update
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Tensors, Tree
from fedmoe.models.mixture import gate_shares
from fedmoe.setting_types import NonNegativeFloat, PositiveFloat
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, Loss, Trainable
from fedmoe.training.classifier import predictions
from fedmoe.training.halves import halves
from fedmoe.training.local import LocalTrainer

NOT_COVERED = (
    "Algorithm 1 sends the gradient of the mixed loss, which passes through a gate and a private expert that saw the "
    "same records without noise: one record changes every gradient, so clipping each does not bound what it changes"
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DomainExpertsConfig(FedAvgConfig):
    """The paper does not print its rates; by default both are that of `training.federated`."""

    variant: Literal[1, 2] = 2  # the paper's Algorithm 1 or 2
    balance: NonNegativeFloat = 1.0  # weight of |mean alpha - 1/2|, the penalty of a gate that prefers one expert
    expert_rate: PositiveFloat | None = None  # of the private expert
    gate_rate: PositiveFloat | None = None


class PrivateParts(NamedTuple):
    """Private, whether they are a client state (Algorithm 1) or a personal state (Algorithm 2)."""

    expert: Tensors  # Theta_P
    gate: Tensors  # w, b
    rounds: Tensor  # in which they were trained


def domain_experts(config: DomainExpertsConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg.fedavg(config, setup)
    (train,) = plain.round
    train = train._replace(figures=lambda before, updates: fedavg.gradient_size(setup, before, updates))
    common = plain._replace(
        validation=None,
        personal_type=PrivateParts,
        frequencies="own",
        predict=lambda b, _client, own, x: predict(setup, b, own, x),
        expert_weights=lambda _b, _client, own, x: gate_shares(setup.gate(own.gate, x), "general", "private"),
    )

    def start(shared: Broadcast, client: ClientId, seed: int) -> PrivateParts:
        return PrivateParts(shared.model, setup.gate.init(seed, "gate", client), torch.tensor(0))

    def finish(b: Broadcast, own: PrivateParts, data: ClientData, rng: Streams) -> PrivateParts:
        return catch_up(config, setup, b, own, data, rng)

    if config.variant == 2:
        beside = train._replace(
            local_update=lambda b, client, data, rng: send_general(setup, b, client, data, rng),
            private_update=lambda b, _c, own, data, rng: evolve(config, setup, setup.federated, b, own, data, rng),
        )
        return common._replace(
            round=(beside,),
            init_personal=lambda b, _state, client, seed: start(b, client, seed),
            personalize=lambda b, _client, own, data, rng: finish(b, own, data, rng),
        )
    return common._replace(
        round=(train._replace(local_update=lambda b, own, data, rng: send_mixed(config, setup, b, own, data, rng)),),
        client_type=PrivateParts,
        init_client=start,
        personalize=lambda b, own, _personal, data, rng: finish(b, own, data, rng),
        no_guarantee=NOT_COVERED,
        adds_noise_anyway=True,
    )


def send_general(
    setup: AlgorithmSetup, shared: Broadcast, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, TrainingReport]:
    """Algorithm 2, lines 6-7: M_G's own loss on the models' half; no private part is at hand here."""
    return fedavg.local_update(setup.expert, setup.federated, shared, client, models_half(data), rng)


def send_mixed(
    config: DomainExpertsConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    own: PrivateParts,
    data: ClientData,
    rng: Streams,
) -> tuple[PrivateParts, Update, TrainingReport]:
    """Algorithm 1: all gradients of the mixed loss at the same point; noise goes to what is sent alone."""
    half = models_half(data).train
    group = setup.federated.group(shared.model, mixed_losses(setup, "model"), half)
    fitted = setup.federated.fit({"model": group}, rng, {"expert": own.expert, "gate": own.gate})
    unnoised = rng._replace(scope=f"{rng.scope}:own", private_steps=None)
    evolved = evolve(config, setup, setup.federated, shared, own, data, unnoised)
    return evolved, Update(fitted.params["model"], half.counts.float()), TrainingReport(fitted.loss_S)


def models_half(data: ClientData) -> ClientData:
    return ClientData(lambda: halves(data.train)[0], lambda: data.validation)


def mixed_losses(setup: AlgorithmSetup, trained: str) -> Loss:
    """The loss of eq. 2 with one of its parts, "model", "expert" and "gate", trained and the others where they are."""

    def losses(trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        parts = {**frozen, **{name: trainable[name] for name in ("expert", "gate") if name in trainable}}
        parts[trained] = trainable[trained]
        gate_B1 = setup.gate(parts["gate"], batch.x, training=batch.training)
        general_BC, private_BC = (
            predictions(setup.task, setup.expert, parts[name], batch) for name in ("model", "expert")
        )
        return setup.task.losses(setup.task.mix(gate_B1, general_BC, private_BC), batch.y)

    return losses


def evolve(
    config: DomainExpertsConfig,
    setup: AlgorithmSetup,
    trainer: LocalTrainer,
    shared: Broadcast,
    own: PrivateParts,
    data: ClientData,
    rng: Streams,
) -> PrivateParts:
    """Lines 8-9 and 12-13: M_P on the models' half, the gate on its own. Where one half is empty, the other waits."""

    def imbalance(trainable: Trainable, _frozen: Tree, batch: Batch, real_B: Tensor) -> Tensor:
        alpha_B = setup.gate(trainable["gate"], batch.x, training=batch.training)[:, 0].sigmoid()
        return config.balance * ((alpha_B * real_B).sum() / real_B.sum() - 0.5).abs()

    for_models, for_gate = halves(data.train)
    of_expert, of_gate = (
        trainer if rate is None else trainer.with_settings(learning_rate=rate)
        for rate in (config.expert_rate, config.gate_rate)
    )
    groups = {
        "expert": of_expert.group(own.expert, mixed_losses(setup, "expert"), for_models),
        "gate": of_gate.group(own.gate, mixed_losses(setup, "gate"), for_gate, batch_term=imbalance),
    }
    fitted = trainer.fit(groups, rng, {"model": shared.model}).params
    return PrivateParts(fitted["expert"], fitted["gate"], own.rounds + (data.train.counts > 0))


def catch_up(
    config: DomainExpertsConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    own: PrivateParts,
    data: ClientData,
    rng: Streams,
) -> PrivateParts:
    """Who took part keeps what the rounds came to, as in the paper; the others train now, beside the delivered M_G."""
    late_S = own.rounds == 0
    if not bool(late_S.any()):
        return own
    trained = evolve(config, setup, setup.personal, shared, own._replace(expert=shared.model), data, rng)

    def chosen(before_S: Tensor, after_S: Tensor) -> Tensor:
        return torch.where(late_S.view(-1, *[1] * (before_S.dim() - 1)), after_S, before_S)

    return trees.tree_map(chosen, own, trained)


def predict(setup: AlgorithmSetup, shared: Broadcast, own: PrivateParts | None, x: Tensor) -> Tensor:
    """Eq. 2; before personalisation M_G alone."""
    general_BC = setup.predict(shared.model, x)
    if own is None:
        return general_BC
    return setup.task.mix(setup.gate(own.gate, x), general_BC, setup.predict(own.expert, x))
