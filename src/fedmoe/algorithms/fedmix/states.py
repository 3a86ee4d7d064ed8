"""What FedMix is set to, and what its server and clients send and keep.

Shape suffixes: K all experts, H those that a client has been sent, C classes, F features, R rows of q.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.aggregation.server_optimizer import Moments, ServerOptimizer
from fedmoe.core_types import Tensors, Tree
from fedmoe.errors import ConfigError
from fedmoe.wire import message

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedMixConfig:
    """Defaults are those of Algorithm 1, but for the server's optimizer.

    A client moves an expert by gradients weighted with q, about 1/K of FedAvg's at the start, so plain averaging is
    slow; Adam's steps do not depend on that scale. The paper takes Adam's default rate, 0.001, which needs a thousand
    rounds and more. 0.01 was chosen on validation data of five data sets after 40 rounds (results/fedmix_defaults).
    """

    num_experts: PositiveInt = 4  # K
    prune_threshold: Share = 0.0  # eta of Algorithm 2; 0: every client trains every expert
    objective: Literal["variational", "mixture"] = "variational"  # eq. 6, or eq. 3, which collapses to one expert
    entropy: bool = False  # keep H(q) in eq. 6: an ensemble instead of specialists
    condition: str = "label"  # what q knows of an example: its label, side information by name, or "client" (eq. 10)
    damping: Share = 0.75  # alpha of the client's own q(z|s), per minibatch; 1 keeps it as it is
    deviation: PositiveFloat = 1.0  # of the Gaussian likelihood of a regression; the experts predict its means
    personal_bias: bool = False  # one private output bias across the experts
    new_clients: Literal["prior", "density"] = "prior"  # weigh released gates by p(s), or by p(s|x) of a VAE each
    share_gates: bool = False  # learn one gate together instead of a private one each
    fine_tune_epochs: NonNegativeInt = 0  # local training of all parts before evaluation
    server_optimizer: ServerOptimizer = ServerOptimizer("adam", 0.01)  # of the experts, phi, and a shared gate
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report

    def __post_init__(self) -> None:
        if self.share_gates and self.new_clients == "density":
            raise ConfigError("algorithm.new_clients='density' weighs private gates, but algorithm.share_gates is on.")
        no_q = self.objective == "mixture"
        for setting, wrong in {
            "entropy=true": self.entropy and (no_q or self.condition == "client"),
            f"condition={self.condition!r}": no_q and self.condition != "label",
            f"prune_threshold={self.prune_threshold}": no_q and self.prune_threshold > 0,
        }.items():
            if wrong:
                why = "objective='mixture' has no q" if no_q else "condition='client' always keeps its entropy"
                raise ConfigError(f"algorithm.{setting}: {why}. Leave it away, or change the other setting.")

    @property
    def floor(self) -> float:
        """eta / K: a client prunes an expert that it uses less."""
        return self.prune_threshold / self.num_experts


@message(experts="experts", expert_ids="expert_ids")
class Broadcast(NamedTuple):
    experts: Tensors  # (H, ...): w_k
    expert_ids: Tensor  # (H,)
    posterior: Tensor  # (R, K): phi
    gate: Tensors  # theta, where gates are shared; else empty
    released: Tree  # for a client without a gate, the `ReleasedState` of each other client; else empty


class ServerState(NamedTuple):
    experts: Tensors  # (K, ...)
    expert_moments: Moments  # one for each expert
    posterior: Tensor
    gate: Tensors
    moments: Moments  # of phi and of the shared gate
    usage: Tensor  # (clients, K): the last q(z|s) that each client reported; zeros before
    released: Tree  # stacked `ReleasedState`s; empty without a release


class ClientState(NamedTuple):
    gate: Tensors  # theta_s; empty where gates are shared
    output_bias: Tensor  # (C,): b_s; (0,) without one
    shares: Tensor  # (R,): of the values that q is conditioned on, among the client's opted-in examples
    usage: Tensor  # (K,): q(z|s), where the client has one of its own
    trained: Tensor  # rounds; 0: the gate says nothing yet


class PersonalState(NamedTuple):
    experts: Tensors  # fine-tuned; else empty
    gate: Tensors
    output_bias: Tensor
    usage: Tensor  # (K,): q(z|s)
    trained: Tensor


@message(experts="experts", expert_ids="expert_ids")
class Update(NamedTuple):
    experts: Tensors  # (H, ...): of those received, the ones in use
    expert_ids: Tensor
    posterior: Tensor
    gate: Tensors
    usage: Tensor  # (K,): q(z|s)
    num_examples: Tensor  # N_s


@message
class TrainingReport(NamedTuple):
    training_loss: Tensor


@message
class Request(NamedTuple):
    """Asks for the private parts that a client may release."""

    posterior: Tensor  # phi of the last round, for q(z|s)


@message
class ReleasedState(NamedTuple):
    """Private parts that a client releases, so that clients without labels get predictions."""

    gate: Tensors
    output_bias: Tensor
    usage: Tensor  # (K,): q(z|s), which its gate pools features with
    num_examples: Tensor  # N_s; 0 from a client that never trained
    density: Tensors  # of p(x|s), where new_clients are asked for it; else empty
