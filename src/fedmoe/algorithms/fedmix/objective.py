"""What a FedMix client optimises (Reisser et al. 2021): eq. 6 or eq. 3, and its own q(z|s) in closed form (eq. 10-13).

The parts of a client's mixture are trained together by one optimizer, as in Algorithm 1: "experts", "posterior" (phi),
"gate" (theta_s) and "output_bias" (b_s). Any of them may be frozen instead; the losses read them from either side.
Shape suffixes: those of `models.expert_mixture`, N examples of a client, S clients of a cohort.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedmoe.algorithms.fedmix.kernel_inputs import FedMixKernel
from fedmoe.algorithms.fedmix.states import Broadcast, ClientState, FedMixConfig
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples, Tensors, Tree
from fedmoe.errors import ConfigError, DataError
from fedmoe.models import expert_mixture as equations
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Regression, Task
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, Trainable
from fedmoe.training.classifier import NO_KERNEL
from fedmoe.training.group import Fitted, Group
from fedmoe.training.kernel_spec import KernelSpec
from fedmoe.training.local import LocalTrainer
from fedmoe.training.optimizers import Sgd


def num_conditions(config: FedMixConfig, setup: AlgorithmSetup) -> int:
    """R: how many rows q(z|...) has; none where every client has a q of its own."""
    if config.condition == "label":
        if isinstance(setup.task, Regression):
            raise ConfigError(
                "algorithm.condition='label' gives q a row for each class, and a regression has none. Set "
                "algorithm.condition = 'client', or name the side information of the examples."
            )
        return setup.num_classes
    if config.condition == "client":
        return 0
    if config.condition not in setup.side_values:
        known = ", ".join(["label", "client", *sorted(setup.side_values)])
        raise ConfigError(
            f"algorithm.condition={config.condition!r}, but these data carry no such side information. Known: {known}."
        )
    return setup.side_values[config.condition]


def condition_values(config: FedMixConfig, y: Tensor, extra: Tensors) -> Tensor:
    return y if config.condition in ("label", "client") else extra[config.condition]


def condition_shares(config: FedMixConfig, num_values: int, examples: Examples, rng: Streams) -> Tensor:
    """(S, R): how often each value occurs among a client's examples; zeros for a client without any."""
    if not num_values:
        return torch.zeros(len(examples.counts), 0)
    if config.condition != "label" and config.condition not in examples.extra:
        raise DataError(
            f"client {rng.clients[0]}: its examples have no {config.condition!r}, which algorithm.condition asks for. "
            "Give it to every training and validation example."
        )
    values_SN = condition_values(config, examples.y, examples.extra)
    real_SN = torch.arange(values_SN.shape[1]) < examples.counts[:, None]
    odd_SN = ((values_SN < 0) | (values_SN >= num_values)) & real_SN
    if odd_SN.any():
        s, n = odd_SN.nonzero()[0].tolist()
        raise DataError(
            f"client {rng.clients[s]}, example {n}: {config.condition}={int(values_SN[s, n])} is outside "
            f"0 … {num_values - 1}, the values that q is conditioned on. Correct the data."
        )
    found_SNR = F.one_hot(values_SN.clamp(0, num_values - 1), num_values) * real_SN[..., None]
    return found_SNR.sum(1) / examples.counts[:, None].clamp_min(1)


def usage_of(config: FedMixConfig, posterior_SRK: Tensor, shares_SR: Tensor, own_SK: Tensor) -> Tensor:
    """q(z|s) (S, K); of a client that has no examples, as if it had equally many of everything."""
    if config.condition == "client":
        return own_SK
    known_S1 = shares_SR.sum(-1, keepdim=True) > 0
    shares_SR = torch.where(known_S1, shares_SR, 1 / shares_SR.shape[-1])
    usage_SK: Tensor = vmap(equations.expected_usage)(equations.log_posterior(posterior_SRK), shares_SR)
    return usage_SK


def in_use_of(config: FedMixConfig, usage_SK: Tensor, expert_ids_SH: Tensor) -> Tensor:
    in_use_SH: Tensor = vmap(lambda usage_H: equations.experts_in_use(usage_H, config.floor))(
        usage_SK.gather(1, expert_ids_SH)
    )
    return in_use_SH


def blank_gate(config: FedMixConfig, setup: AlgorithmSetup) -> Tensors:
    """Weighs all experts alike; the paper does not say where gates start."""
    shape = (config.num_experts, setup.expert.num_features)
    return {"weight": torch.zeros(shape), "bias": torch.zeros(config.num_experts)}


def trains_posterior(config: FedMixConfig) -> bool:
    """phi is trained by eq. 6; eq. 3 has no q, and a q of the client's own is not shared."""
    return config.objective == "variational" and config.condition != "client"


def posterior_part(config: FedMixConfig, shared: Broadcast) -> Tensors:
    return {"posterior": shared.posterior} if trains_posterior(config) else {}


def private_parts(config: FedMixConfig, shared: Broadcast, own: ClientState) -> Tree:
    bias = {"output_bias": own.output_bias} if config.personal_bias else {}
    return {"gate": shared.gate or own.gate, **bias}


def num_outputs(setup: AlgorithmSetup) -> int:
    return setup.num_classes or math.prod(setup.target_shape or ())


def log_likelihoods(config: FedMixConfig, task: Task, predictions_HBC: Tensor, y_B: Tensor) -> Tensor:
    """log p(y|x, z): (B, H)."""
    if isinstance(task, Regression):
        return equations.gaussian_log_likelihoods(predictions_HBC, y_B, config.deviation)
    return equations.log_likelihoods(predictions_HBC, y_B)


def outputs_at(network: Network, parts: Tree, batch: Batch, task: Task = CLASSIFICATION) -> tuple[Tensor, Tensor]:
    """Predictions (H, B, C) and features (H, B, F); from the cache where the experts are frozen."""
    if "expert_outputs" in batch.extra:
        num_scores = batch.extra["expert_outputs"].shape[-1] - parts["gate"]["weight"].shape[-1]
        scores_HBC, features_HBF = batch.extra["expert_outputs"].transpose(0, 1).tensor_split([num_scores], dim=-1)
    else:
        scores_HBC, features_HBF = equations.expert_outputs(network, parts["experts"], batch.x, training=batch.training)
    return task.prediction(scores_HBC + parts.get("output_bias", 0.0)), features_HBF


def with_expert_outputs(network: Network, experts_SH: Tensors, examples: Examples, trainer: LocalTrainer) -> Examples:
    """Frozen experts have the same outputs in every epoch: compute them once."""

    def outputs(experts_H: Tensors, batch: Batch) -> Tensor:
        return torch.cat(equations.expert_outputs(network, experts_H, batch.x), dim=-1).transpose(0, 1)

    outputs_SNHX = trainer.per_example(outputs, experts_SH, examples)
    return examples._replace(extra={**examples.extra, "expert_outputs": outputs_SNHX})


def posterior_at(config: FedMixConfig, trainable: Trainable, parts: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
    """log q(z|...) of each example (B, K), and q(z|s) (K,)."""
    if config.condition == "client":
        usage_K = trainable["usage"]["share"]
        log_q_K = usage_K.clamp_min(torch.finfo(usage_K.dtype).tiny).log()
        return log_q_K.expand(len(batch), -1), usage_K
    log_q_RK = equations.log_posterior(parts["posterior"])
    usage_K = equations.expected_usage(log_q_RK, parts["shares"])
    return log_q_RK[condition_values(config, batch.y, batch.extra)], usage_K


@dataclass(frozen=True)
class Objective:
    """Minus eq. 6, or minus eq. 3, of each example."""

    config: FedMixConfig
    network: Network
    task: Task = CLASSIFICATION

    def __call__(self, trainable: Trainable, frozen: Tree, batch: Batch) -> Tensor:
        parts = {**frozen, **trainable.get("mixture", {})}
        expert_ids_H, in_use_H = parts["expert_ids"], parts["in_use"]
        predictions_HBC, features_HBF = outputs_at(self.network, parts, batch, self.task)
        log_q_BK, usage_K = posterior_at(self.config, trainable, parts, batch)
        pooled_BF = equations.pooled_features(usage_K[expert_ids_H], in_use_H, features_HBF)
        log_gate_BK = equations.log_gate(parts["gate"], pooled_BF)
        log_likelihood_BH = log_likelihoods(self.config, self.task, predictions_HBC, batch.y)
        if self.config.objective == "mixture":
            log_gate_BH = equations.pruned_gate(log_gate_BK, expert_ids_H, in_use_H)
            return -equations.log_marginal(log_gate_BH, log_likelihood_BH)
        pruned_q_BH = equations.pruned_posterior(log_q_BK[:, expert_ids_H], in_use_H)
        objective_B = equations.expected_log_joint(log_q_BK, pruned_q_BH, log_likelihood_BH, log_gate_BK)
        return -objective_B - equations.entropy(log_q_BK) if self.config.entropy else -objective_B

    def kernel_spec(self, params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str:
        """Algorithms 1 and 2 as printed, and eq. 10-13 without pruning, where experts and gate are trained."""
        config, own_q = self.config, self.config.condition == "client"
        if isinstance(self.task, Regression):
            return NO_KERNEL
        if config.objective != "variational" or config.entropy or config.personal_bias:
            return "the kernels know FedMix's variational objective without entropy and personal biases only"
        if "experts" not in params_S or "gate" not in params_S:
            return "the kernels train FedMix's experts and gate together, and one of them is frozen"
        if not self.network.has_native_features:
            return f"the {self.network.name} has no layer before its output layer, whose output the gate could read"
        if own_q and not frozen_S["in_use"].all():
            return "the kernels do not prune where every client has a q of its own"
        kernel = FedMixKernel(
            num_experts=config.num_experts,
            num_features=self.network.num_features,
            num_values=None if own_q else params_S["posterior"].shape[1],
            shape_of_labels=tuple(data.y.shape),
            condition_SN=condition_values(config, data.y, data.extra),
            expert_ids_SH=frozen_S["expert_ids"],
            in_use_SH=frozen_S["in_use"],
            shares_SR=frozen_S["shares"],
            damping=config.damping,
            usage_group="usage",
        )
        return KernelSpec({"experts/": self.network}, num_copies=frozen_S["expert_ids"].shape[1], objective=kernel)


def own_usage(
    config: FedMixConfig, network: Network, share_SK: Tensor, data: Examples, task: Task = CLASSIFICATION
) -> Group:
    """The client's own q(z|s), moved to the closed form of each minibatch (eq. 13) with damping.

    A step of length 1 - alpha down the slope of |pi - target|² / 2 is alpha pi + (1 - alpha) target, so the trainer
    that takes all other steps takes this one too, on the same minibatches.
    """

    def distance(trainable: Trainable, frozen: Tree, batch: Batch, real_B: Tensor) -> Tensor:
        parts = {**frozen, **trainable.get("mixture", {})}
        usage_K: Tensor = trainable["usage"]["share"]
        with torch.no_grad():
            predictions_HBC, features_HBF = outputs_at(network, parts, batch, task)
            pooled_BF = equations.pooled_features(usage_K[parts["expert_ids"]], parts["in_use"], features_HBF)
            log_gate_BH = equations.log_gate(parts["gate"], pooled_BF)[:, parts["expert_ids"]]
            log_joint_BH = log_gate_BH + log_likelihoods(config, task, predictions_HBC, batch.y)
            target_H = equations.closed_form_usage(log_joint_BH, real_B)
            target_K = target_H @ (parts["expert_ids"][:, None] == torch.arange(config.num_experts)).to(target_H.dtype)
        squares: Tensor = (usage_K - target_K).square().sum()
        return squares / 2

    def nothing(_trainable: Trainable, _frozen: Tree, batch: Batch) -> Tensor:
        return torch.zeros(len(batch))

    return Group({"share": share_SK}, nothing, data, Sgd(1 - config.damping), batch_term=distance)


def train_parts(
    config: FedMixConfig,
    setup: AlgorithmSetup,
    parts: Tree,
    frozen: Tree,
    usage_SK: Tensor,
    data: ClientData,
    trainer: LocalTrainer,
    rng: Streams,
    *,
    stop_early: bool = False,
) -> Fitted:
    """Train `parts` of the mixture, and the clients' own q(z|s), the group "usage", where they have one."""
    losses = Objective(config, setup.expert, setup.task)
    groups = {"mixture": trainer.group(parts, losses, data.train)} if parts else {}
    if config.condition == "client":
        usage = own_usage(config, setup.expert, usage_SK, data.train, setup.task)
        groups["usage"] = usage._replace(augmentation=trainer.settings.augmentation)
    stopping = trainer.early_stopping(losses, data.validation) if stop_early else None
    return trainer.fit(groups, rng, frozen, stopping)


def mean_gate(config: FedMixConfig, setup: AlgorithmSetup, trained: Tree, frozen: Tree, examples: Examples) -> Tensor:
    """p(z|s) (S, K): what the gate says on average, where there is no q to stand for it."""

    def gate(tree: tuple[Tree, Tree], batch: Batch) -> Tensor:
        parts = {**tree[1], **tree[0]}
        _, usage_K = posterior_at(config, {}, parts, batch)
        _, features_HBF = outputs_at(setup.expert, parts, batch)
        pooled_BF = equations.pooled_features(usage_K[parts["expert_ids"]], parts["in_use"], features_HBF)
        return equations.log_gate(parts["gate"], pooled_BF).exp()

    total_SK = setup.federated.per_example(gate, (trained, frozen), examples).sum(1)
    return total_SK / total_SK.sum(-1, keepdim=True)
