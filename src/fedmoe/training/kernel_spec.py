"""What a loss tells the trainer so that the native kernels can take whole epochs of it."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from fedmoe.core_types import Examples, Tree
from fedmoe.models.network import Network
from fedmoe.native.trainer import FedMixInputs


class KernelSpec(NamedTuple):
    """Which networks the group holds, in the order of the kernels: by the prefix of their parameters' names.

    With a `holding` the one network is that of all experts, whose parameters have an axis of experts; "gate/" and
    "posterior" lie beside them. Where every client has a q of its own, it is `usage`: (name of its group, damping).
    """

    networks: dict[str, Network]
    given_SNC: Tensor | None = None  # a frozen second expert's log-probabilities
    holding: FedMixInputs | None = None
    usage: tuple[str, float] | None = None


@runtime_checkable
class KernelLoss(Protocol):
    """A loss that the kernels know, in some settings."""

    def kernel_spec(self, params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | None: ...
