"""Whole local training in the native kernels: many batches, forward, backward and optimizer step, in one call."""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.native.build import library
from fedmoe.native.kernel import Kernel


class OptimizerSettings(ctypes.Structure):
    """`struct Optimizer` in chain.cpp."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_double) for name in ("rate", "momentum", "beta1", "beta2", "epsilon")),
        ("adam", ctypes.c_int64),
    ]


class Net(ctypes.Structure):
    """`struct Net` in chain.cpp."""

    _fields_: ClassVar[list[Any]] = [
        ("layers", ctypes.c_void_p), ("count", ctypes.c_int64), ("offsets", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p), ("num_params", ctypes.c_int64),
    ]  # fmt: skip


class Trainer:
    """One network by cross-entropy; or a mixture of two: (first, gate), or (first, gate, second)."""

    def __init__(
        self, kernels: Sequence[Kernel], offsets: Sequence[NDArray[np.int64]], optimizer: OptimizerSettings
    ) -> None:
        """`offsets`: where the parameters of each network start in a client's flat vector."""
        self._kernels, self._offsets, self._optimizer = (
            list(kernels),
            list(offsets),
            optimizer,
        )  # kept alive for `_nets`
        self._nets = (Net * len(self._kernels))(
            *(
                Net(kernel.layers.ctypes.data, len(kernel.layers), at.ctypes.data, kernel.sizes.ctypes.data, len(at))
                for kernel, at in zip(self._kernels, self._offsets, strict=True)
            )
        )
        self._train = library().fedmoe_train
        whole, where = ctypes.c_int64, ctypes.c_void_p
        self._train.argtypes = [where, whole, *[where] * 5, whole, where, whole, where, where, whole, where]
        self._train.restype = ctypes.c_double

    def run(self, rows: "Rows", s: int, order: Tensor, ends: NDArray[np.int64], steps_before: int) -> float:
        """The steps of client `s`, in place on its weights and slots: the sum of the batches' mean losses.

        `order` holds the rows of all batches, `ends` where each batch ends in it.
        """
        images, y, given, flat, mean, square = (address and address + s * step for address, step in rows.places)
        loss: float = self._train(
            self._nets, len(self._kernels), images, y, given, order.data_ptr(), ends.ctypes.data, len(ends),
            flat, rows.num_weights, mean, square, steps_before, ctypes.byref(self._optimizer),
        )  # fmt: skip
        return loss


class Rows:
    """The data and weights of a cohort, client by client, where the kernels find them.

    `given_SN`: the frozen second expert's log-probability at the label of each row, where there is one.
    """

    def __init__(
        self, images_SN: Tensor, y_SN: Tensor, given_SN: Tensor | None, flat_SP: Tensor, slots: Sequence[Tensor]
    ) -> None:
        self._tensors = (images_SN, y_SN, given_SN, flat_SP, *slots)  # kept alive: `places` points into them
        mean, square = [*slots, None, None][:2]
        self.num_weights = flat_SP.shape[1]
        # Address, and bytes from client to client.
        self.places: list[tuple[int | None, int]] = [
            (None, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
            for tensor in (images_SN, y_SN, given_SN, flat_SP, mean, square)
        ]
