"""How a loss declares what the native kernels need for whole epochs of it.

A loss that the kernels know is an object with a method
``kernel_spec(params_S: Tree, data: Examples, frozen_S: Tree) -> KernelSpec | str``; the string says why the kernels
cannot take whole epochs in these settings.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from fedmoe.models.network import Network
from fedmoe.native.trainer import Objective

Shapes = dict[str, tuple[int, ...]]


class KernelObjective(Protocol):
    """A loss of an algorithm's own that has a function in the kernels, beyond the classifiers that they all know."""

    @property
    def function(self) -> str:
        """Its name in native/kernels.cpp."""

    @property
    def shapes(self) -> Shapes:
        """Of the group's tensors beside the networks, for one client."""

    @property
    def other_groups(self) -> frozenset[str]:
        """Groups that the function trains too, in place."""

    def bind(self, starts: Mapping[str, int], flat: Mapping[str, Tensor]) -> Objective:
        """For `starts`, where each tensor lies in a client's vector, and `flat`, the vectors (S, P) by group.

        Everything that the function reads is checked here: it reads without looking.
        """


class KernelSpec(NamedTuple):
    """The networks of the group in the order of the kernels, by the prefix of their parameters' names."""

    networks: dict[str, Network]
    num_copies: int | None = None  # of the one network, in an axis of experts before its parameters' own axes
    second_SNC: Tensor | None = None  # a frozen second expert's log-probabilities
    logit_offset_SC: Tensor | None = None
    score_offset_SNC: Tensor | None = None
    class_weight_SC: Tensor | None = None
    objective: KernelObjective | None = None
