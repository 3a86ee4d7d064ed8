"""Whole local training in the native kernels: many batches, forward, backward and optimizer step, in one call.

The kernels read and write memory without looking. Whoever makes a `Trainer` and a `ClientTable` has compared names,
shapes, dtypes and ranges before: `training.native_epochs` does.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.native.build import library
from fedmoe.native.kernel import Kernel

CLASSIFIER = "fedmoe_train_classifier"  # cross-entropy of one network, or of a mixture of two


class OptimizerSettings(ctypes.Structure):
    """`struct Optimizer` in training.h."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_double) for name in ("rate", "momentum", "beta1", "beta2", "epsilon", "weight_decay")),
        *((name, ctypes.c_int64) for name in ("adam", "decoupled")),
        *((name, ctypes.c_double) for name in ("proximal", "max_norm")),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int64),
    ]


class Net(ctypes.Structure):
    """`struct Net` in training.h."""

    _fields_: ClassVar[list[Any]] = [
        ("layers", ctypes.c_void_p), ("count", ctypes.c_int64), ("offsets", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p), ("num_params", ctypes.c_int64), ("constants", ctypes.c_void_p),
        ("lowest", ctypes.c_int64),
    ]  # fmt: skip


class Objective(NamedTuple):
    """A loss with a function of its own in kernels.cpp, and what that function alone reads."""

    function: str
    settings: ctypes.Structure | None = None
    inputs: tuple[Tensor | None, ...] = ()  # (S, ...), in the order of the function's struct of inputs


class Trainer:
    """The networks that a client trains together, by one objective and one optimizer."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        offsets: Sequence[NDArray[np.int64]],
        lowest: Sequence[int],
        optimizer: OptimizerSettings,
        ranges: NDArray[np.int64],
        function: str = CLASSIFIER,
    ) -> None:
        """`offsets`: where the parameters of each network start in a client's flat vector; -1 for a constant.

        `lowest`: the first layer of each network that is trained. `ranges` (n, 2): begin and end of each stretch of the
        flat vector that is.
        """
        constants = [_constants(kernel) for kernel in kernels]
        self._referenced = (
            list(kernels),
            list(offsets),
            constants,
            ranges,
        )  # `_nets` and the optimizer point into them
        optimizer.ranges, optimizer.num_ranges = ranges.ctypes.data, len(ranges)
        self._optimizer, self._num_nets = optimizer, len(kernels)
        self._nets = (Net * len(kernels))(
            *(
                Net(
                    kernel.layers.ctypes.data, len(kernel.layers), at.ctypes.data, kernel.sizes.ctypes.data, len(at),
                    fixed.ctypes.data, first,
                )
                for kernel, at, fixed, first in zip(kernels, offsets, constants, lowest, strict=True)
            )
        )  # fmt: skip
        self._train = getattr(library(), function)
        whole, where = ctypes.c_int64, ctypes.c_void_p
        self._train.argtypes = [where, whole, where, whole, whole, where, where, where]
        self._train.restype = None

    def run(self, table: "ClientTable", clients: Sequence["Steps"]) -> list[float]:
        """Train clients in place on their weights and optimizer state: the sum of each one's mean batch losses."""
        places, orders, ends, steps_before, rates = zip(*clients, strict=True)
        width = len(table.starts)
        tasks = np.empty((len(clients), width + 5), dtype=np.int64)  # of `struct Client` in training.h
        tasks[:, :width] = table.starts + np.array(places)[:, None] * table.steps
        tasks[:, width] = [order.data_ptr() for order in orders]
        tasks[:, width + 1] = [end.data_ptr() for end in ends]
        tasks[:, width + 2] = [end.shape[0] for end in ends]
        tasks[:, width + 3] = steps_before
        tasks[:, width + 4] = [0 if of_client is None else of_client.data_ptr() for of_client in rates]
        losses = np.empty(len(clients))
        settings = table.objective.settings
        self._train(
            self._nets, self._num_nets, tasks.ctypes.data, len(clients), table.num_weights,
            ctypes.byref(self._optimizer), losses.ctypes.data, ctypes.byref(settings) if settings else None,
        )  # fmt: skip
        sums: list[float] = losses.tolist()
        return sums


def _constants(kernel: Kernel) -> NDArray[np.int64]:
    """Addresses of the frozen parameters, 0 for the others."""
    frozen = kernel.constants
    return np.array([frozen[n].data_ptr() if n in frozen else 0 for n in kernel.program.params], dtype=np.int64)


class Steps(NamedTuple):
    """What a client does in a call."""

    s: int  # its place in the cohort
    order: Tensor  # the rows of all batches
    ends: Tensor  # where each batch ends in `order`
    steps_before: int
    rates: Tensor | None = None  # of each batch, float64; None: the optimizer's


class ClientTensors(NamedTuple):
    """What the kernels find of each client, (S, ...): the first pointers of `struct Client` in training.h."""

    images: Tensor
    y: Tensor
    second: Tensor | None  # (S, N): a frozen second expert's log-probability at each label
    logit_offset: Tensor | None  # (S, C): added to the first network's scores
    score_offset: Tensor | None  # (S, N, C): added to them for each example
    class_weight: Tensor | None  # (S, C): what an example of each class counts
    flat: Tensor  # (S, P)
    mean: Tensor | None  # optimizer state, (S, P) each
    square: Tensor | None
    anchor: Tensor | None  # (S, P): where the proximal term pulls to
    gradient_offset: Tensor | None  # (S, P)


class ClientTable:
    """Where the tensors of a cohort lie: addresses of the first client, and bytes from client to client."""

    def __init__(self, tensors: ClientTensors, objective: Objective) -> None:
        self.tensors, self.objective = tensors, objective  # `starts` points into them
        self.num_weights = tensors.flat.shape[1]
        self._inputs = _input_addresses(objective.inputs, len(tensors.flat)) if objective.inputs else None
        of_inputs = (0, 0) if self._inputs is None else (self._inputs.ctypes.data, self._inputs.strides[0])
        places = [*map(_place, tensors), of_inputs]
        self.starts, self.steps = np.array(places).T


def _place(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


def _input_addresses(inputs: tuple[Tensor | None, ...], clients: int) -> NDArray[np.int64]:
    """(S, inputs): for each client the struct of pointers that the objective's function reads."""
    starts, steps = np.array([*map(_place, inputs)]).T
    return np.ascontiguousarray(starts + np.arange(clients)[:, None] * steps)
