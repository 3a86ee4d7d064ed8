"""What FedJETs is set to, what its server and clients send and keep, and what its functions share.

Shape suffixes: those of `models.router`, K chosen experts.
"""

from typing import NamedTuple

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientId, Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.network import Network
from fedmoe.models.router import router_network
from fedmoe.training.routed_experts import Experts, RoutedLoss
from fedmoe.wire import message


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedJetsConfig:
    """The paper's CIFAR-10: 5 experts of which a client gets 2, a router with plain SGD at 0.001."""

    num_experts: PositiveInt = 5  # M
    num_sent: PositiveInt = 2  # K
    router_hidden: PositiveInt = 64  # not stated there
    router_rate: PositiveFloat = 0.001
    max_weight: PositiveFloat | None = None  # the server's cap on the example count that a client may report
    # The experts over which the router's scores sum to 1 in the loss. With "all", as printed, every client pushes down
    # the experts that it was not sent, and the router may come to choose the same ones for everybody.
    normalised_over: Experts = "all"

    def __post_init__(self) -> None:
        if self.num_sent > self.num_experts:
            raise ConfigError(
                f"algorithm.num_sent={self.num_sent} is above algorithm.num_experts={self.num_experts}: a client "
                "cannot be sent more experts than there are. Lower num_sent or raise num_experts."
            )


class ServerState(NamedTuple):
    experts: Tensors  # (M, ...): W_i
    router: Tensors  # W_r


class ClientState(NamedTuple):
    router: Tensors  # as it was last sent, so that it is sent once per round


class PersonalState(NamedTuple):
    usable: Tensor  # (H,) bool: the K of the experts held that suit this client best


@message
class RouterDown(NamedTuple):
    router: Tensors


@message
class Choice(NamedTuple):
    experts: Tensor  # (K,): e_s, best first


@message(experts="experts", expert_ids="expert_ids")
class ExpertsDown(NamedTuple):
    experts: Tensors  # (H, ...)
    expert_ids: Tensor  # (H,)
    router: Tensors  # for those that have not been sent it in this round: anchors, and at the delivery; else empty


@message(experts="experts", expert_ids="expert_ids")
class Trained(NamedTuple):
    experts: Tensors  # (H, ...)
    expert_ids: Tensor  # (H,)
    router: Tensors
    num_examples: Tensor


class Parts(NamedTuple):
    """What the functions below share."""

    config: FedJetsConfig
    setup: AlgorithmSetup
    common: CommonExpert
    router: Network
    expert_of_anchor: dict[ClientId, int]

    @property
    def loss(self) -> RoutedLoss:
        return RoutedLoss(self.setup.expert, self.router, self.config.router_rate, self.config.normalised_over)


def require_common(setup: AlgorithmSetup, name: str) -> CommonExpert:
    if setup.common is None:
        raise ConfigError(
            f"algorithm.name={name!r} needs a common expert, which every client has: add [common_expert] with "
            "weights = 'FILE.safetensors'. 'fedmoe pretrain CONFIG' trains one on public data (split.public_size)."
        )
    return setup.common


def build_router(setup: AlgorithmSetup, common: CommonExpert, num_experts: int, hidden: int) -> Network:
    router = router_network(common.num_features, num_experts, hidden)
    if setup.federated.backend == "native" and router.obstacle is None:
        router.go_native()
    return router
