"""How a FedMix client predicts: with the gate that it trained, or with one fitted to its labels after the rounds.

Shape suffixes: those of `fedmix.states`, S clients of a cohort, B examples.
"""

import torch
from torch import Tensor

from fedmoe.algorithms.fedmix.objective import (
    condition_shares,
    in_use_of,
    posterior_part,
    private_parts,
    train_parts,
    usage_of,
    with_expert_outputs,
)
from fedmoe.algorithms.fedmix.release import average_bias, log_average_gate, log_client_shares
from fedmoe.algorithms.fedmix.states import Broadcast, ClientState, FedMixConfig, PersonalState
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors, Tree
from fedmoe.models import expert_mixture as equations
from fedmoe.streams import Streams


def personalize(
    config: FedMixConfig, setup: AlgorithmSetup, shared: Broadcast, client: ClientState, data: ClientData, rng: Streams
) -> PersonalState:
    """A client that trained keeps its gate; one that did not fits a gate to its labels, experts and q fixed.

    "MAP inference at the local objective": the paper names no prior, so it is flat, with early stopping instead.
    Then `fine_tune_epochs` of local training, if any, move all parts (appendix G).
    """
    is_new_S = client.trained == 0
    own_SR = condition_shares(config, shared.posterior.shape[1], data.train, rng)
    condition_shares(config, shared.posterior.shape[1], data.validation, rng)
    shares_SR = torch.where(is_new_S[:, None], own_SR, client.shares)
    usage_SK = usage_of(config, shared.posterior, shares_SR, client.usage)
    frozen = {
        "experts": shared.experts, "posterior": shared.posterior, "shares": shares_SR,
        "expert_ids": shared.expert_ids, "in_use": in_use_of(config, usage_SK, shared.expert_ids),
    }  # fmt: skip
    parts = private_parts(config, shared, client)
    for_fit = data.map(lambda part: part._replace(counts=part.counts * is_new_S))  # no examples, no step
    parts, own_SK = fit_gate(config, setup, parts, frozen, client.usage, for_fit, rng)
    experts: Tensors = {}
    if config.fine_tune_epochs:
        start = {**parts, "experts": shared.experts, **posterior_part(config, shared)}
        trainer = setup.federated.with_settings(epochs=config.fine_tune_epochs, steps=None)
        tuned = train_parts(config, setup, start, frozen, own_SK, data, trainer, rng._replace(scope="fine-tune")).params
        parts, experts = tuned["mixture"], tuned["mixture"]["experts"]
        own_SK = tuned["usage"]["share"] if config.condition == "client" else own_SK
    return PersonalState(
        experts=experts,
        gate=parts["gate"],
        output_bias=parts.get("output_bias", client.output_bias),
        usage=usage_of(config, parts.get("posterior", shared.posterior), shares_SR, own_SK),
        trained=client.trained + (data.train.counts > 0),
    )


def fit_gate(
    config: FedMixConfig,
    setup: AlgorithmSetup,
    parts: Tree,
    frozen: Tree,
    usage_SK: Tensor,
    data: ClientData,
    rng: Streams,
) -> tuple[Tree, Tensor]:
    """The private parts and, where the client has one, its own q(z|s); a shared gate stays as it is."""
    private = {name: part for name, part in parts.items() if name != "gate" or not config.share_gates}
    if not private and config.condition != "client":
        return parts, usage_SK
    trainer, fixed = setup.personal, {**frozen, **parts}
    if not trainer.settings.augment:  # else every batch has images that the experts have not seen yet
        experts = fixed.pop("experts")
        data = data.map(lambda one: with_expert_outputs(setup.expert, experts, one, trainer))
    fitted = train_parts(config, setup, private, fixed, usage_SK, data, trainer, rng, stop_early=True).params
    own_SK = fitted["usage"]["share"] if config.condition == "client" else usage_SK
    return {**parts, **fitted.get("mixture", {})}, own_SK


def predict(
    config: FedMixConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    client: ClientState,
    personal: PersonalState | None,
    x: Tensor,
) -> Tensor:
    """Eq. 2."""
    return setup.task.mixture(*gate_and_experts(config, setup, shared, client, personal, x))


def gate_and_experts(
    config: FedMixConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    client: ClientState,
    personal: PersonalState | None,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """log p(z|x, s) (B, H) and what the experts predict (H, B, C): log p(y|x, z), or means.

    With the client's own gate; with the average of those released, if it has none; else all experts alike.
    """
    own = client if personal is None else personal
    experts = shared.experts if personal is None else personal.experts or shared.experts
    scores_HBC, features_HBF = equations.outputs_one_by_one(setup.expert, experts, x)
    if shared.released and not own.trained:
        log_shares_SB = log_client_shares(setup, shared.released, x)
        log_gate_BK = log_average_gate(config, shared.released, features_HBF, log_shares_SB)
        return log_gate_BK, expert_predictions(config, setup, scores_HBC, average_bias(shared.released))
    usage_K = own_usage_of(config, shared, client) if personal is None else personal.usage
    in_use_H = equations.experts_in_use(usage_K[shared.expert_ids], config.floor)
    pooled_BF = equations.pooled_features(usage_K[shared.expert_ids], in_use_H, features_HBF)
    gate = (shared.gate or client.gate) if personal is None else personal.gate  # fine-tuning moves a shared gate too
    log_gate_BK = equations.log_gate(gate, pooled_BF)
    log_gate_BH = equations.pruned_gate(log_gate_BK, shared.expert_ids, in_use_H)
    return log_gate_BH, expert_predictions(config, setup, scores_HBC, own.output_bias)


def expert_weights(
    config: FedMixConfig,
    setup: AlgorithmSetup,
    shared: Broadcast,
    client: ClientState,
    personal: PersonalState,
    x: Tensor,
) -> Tensors:
    log_gate_BH, _ = gate_and_experts(config, setup, shared, client, personal, x)
    gate_HB = log_gate_BH.exp().T
    return {f"expert {k}": gate_B for k, gate_B in zip(shared.expert_ids.tolist(), gate_HB, strict=True)}


def expert_predictions(config: FedMixConfig, setup: AlgorithmSetup, scores_HBC: Tensor, bias_C: Tensor) -> Tensor:
    return setup.task.prediction(scores_HBC + bias_C if config.personal_bias else scores_HBC)


def own_usage_of(config: FedMixConfig, shared: Broadcast, client: ClientState) -> Tensor:
    """q(z|s) (K,) of one client, with the phi that it was given last."""
    return usage_of(config, shared.posterior[None], client.shares[None], client.usage[None])[0]
