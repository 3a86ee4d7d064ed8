"""Whole local training in the native kernels: many batches, forward, backward and optimizer step, in one call."""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.native.build import library
from fedmoe.native.kernel import Kernel

NUM_PLACES = 11  # pointers of `struct Client` in training.h that differ by client alone: those of `Rows`


class OptimizerSettings(ctypes.Structure):
    """`struct Optimizer` in training.h."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_double) for name in ("rate", "momentum", "beta1", "beta2", "epsilon")),
        ("adam", ctypes.c_int64),
    ]


class Net(ctypes.Structure):
    """`struct Net` in training.h."""

    _fields_: ClassVar[list[Any]] = [
        ("layers", ctypes.c_void_p), ("count", ctypes.c_int64), ("offsets", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p), ("num_params", ctypes.c_int64),
    ]  # fmt: skip


class FedMixObjective(ctypes.Structure):
    """`struct FedMixObjective` in fedmix_objective.h: where the parts beside the experts start, and sizes."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_int64) for name in ("posterior", "gate_weight", "gate_bias")),
        *((name, ctypes.c_int64) for name in ("num_values", "num_experts", "num_features")),
        ("damping", ctypes.c_double),
    ]


class Trainer:
    """One network by cross-entropy; a mixture of two: (first, gate), or (first, gate, second); or FedMix's experts."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        offsets: Sequence[NDArray[np.int64]],
        optimizer: OptimizerSettings,
        bound: FedMixObjective | None = None,
    ) -> None:
        """`offsets`: where the parameters of each network start in a client's flat vector."""
        self._kernels, self._offsets = list(kernels), list(offsets)  # kept still_training for `_nets`
        self._optimizer, self._bound = optimizer, bound
        self._nets = (Net * len(self._kernels))(
            *(
                Net(kernel.layers.ctypes.data, len(kernel.layers), at.ctypes.data, kernel.sizes.ctypes.data, len(at))
                for kernel, at in zip(self._kernels, self._offsets, strict=True)
            )
        )
        self._train = library().fedmoe_train
        whole, where = ctypes.c_int64, ctypes.c_void_p
        self._train.argtypes = [where, whole, where, where, whole, whole, where, where]
        self._train.restype = None

    def run(self, rows: "Rows", clients: Sequence["Steps"]) -> list[float]:
        """Train clients in place on their weights and slots: for each the sum of its batches' mean losses."""
        places, orders, ends, steps_before = zip(*clients, strict=True)
        tasks = np.empty((len(clients), NUM_PLACES + 4), dtype=np.int64)  # of `struct Client` in training.h
        tasks[:, :NUM_PLACES] = rows.starts + np.array(places)[:, None] * rows.steps
        tasks[:, NUM_PLACES] = [order.data_ptr() for order in orders]
        tasks[:, NUM_PLACES + 1] = [end.data_ptr() for end in ends]
        tasks[:, NUM_PLACES + 2] = [end.shape[0] for end in ends]
        tasks[:, NUM_PLACES + 3] = steps_before
        losses = np.empty(len(clients))
        self._train(
            self._nets, len(self._kernels), ctypes.byref(self._bound) if self._bound else None, tasks.ctypes.data,
            len(clients), rows.num_weights, ctypes.byref(self._optimizer), losses.ctypes.data,
        )  # fmt: skip
        told: list[float] = losses.tolist()
        return told


class Steps(NamedTuple):
    """What a client does in a call."""

    s: int  # its place in `Rows`
    order: Tensor  # the rows of all batches
    ends: Tensor  # where each batch ends in `order`
    steps_before: int


class FedMixInputs(NamedTuple):
    """What the clients of a cohort know of FedMix's experts; the letters of `models.expert_mixture`."""

    condition_SN: Tensor  # of each example: which row of q
    expert_ids_SH: Tensor
    in_use_SH: Tensor  # bool
    shares_SR: Tensor
    usage_SK: Tensor | None = None  # q(z|s) where every client has its own: moved in place, by its closed form


class Rows:
    """The data and weights of a cohort, client by client, where the kernels find them.

    `given_SN`: the frozen second expert's log-probability at the label of each row, where there is one.
    """

    def __init__(
        self,
        images_SN: Tensor,
        y_SN: Tensor,
        flat_SP: Tensor,
        slots: Sequence[Tensor],
        given_SN: Tensor | None = None,
        holding: FedMixInputs | None = None,
    ) -> None:
        mean, square = [*slots, None, None][:2]
        held = holding or [None] * len(FedMixInputs._fields)
        tensors = (images_SN, y_SN, given_SN, flat_SP, mean, square, *held)
        self._tensors = tensors  # kept still_training: `starts` points into them
        self.num_weights = flat_SP.shape[1]
        places = [
            (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
            for tensor in tensors
        ]
        self.starts, self.steps = np.array(places).T  # addresses of the first client; bytes from client to client
