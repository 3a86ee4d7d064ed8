"""A network's program on tensors: the native kernels as a differentiable function, and whole local training.

Every tensor may have leading axes (clients, experts): items are computed one after another, each by itself, so its
numbers do not depend on the others. `torch.func.vmap` adds such an axis, whatever function is being mapped.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.errors import DataError, MessageError
from fedmoe.native.build import library
from fedmoe.native.program import CONV, EMBEDDING_MEAN, Program

Pointers = NDArray[np.int64]

# Kernels read up to a vector past the end of an image.
SLACK = 32


class Kernel:
    """One program, bound to the compiled library."""

    def __init__(self, program: Program, shapes: Sequence[tuple[int, ...]]) -> None:
        """`shapes` of the parameters, in the program's order."""
        self.program, self.shapes = program, list(shapes)
        self.layers = np.array(program.layers, dtype=np.int64)
        self.sizes = np.array([math.prod(shape) for shape in shapes], dtype=np.int64)
        lib = library()
        self._forward, self._backward, self._tape_size = lib.fedmoe_forward, lib.fedmoe_backward, lib.fedmoe_tape_size
        whole, where = ctypes.c_int64, ctypes.c_void_p
        head: list[Any] = [where, whole]
        self._forward.argtypes = [*head, whole, whole, where, where, whole, where, where]
        self._backward.argtypes = [*head, whole, whole, where, where, where, whole, where, where, where, where]
        self._tape_size.argtypes = [*head, whole]
        self._channels_last = lib.fedmoe_channels_last
        self._channels_last.argtypes, self._channels_last.restype = [where, where, whole, whole, whole], None
        self._tape_size.restype = whole
        self._forward.restype = self._backward.restype = None
        self._head = (self.layers.ctypes.data, len(self.layers))

    def __call__(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """x (..., B, *input_shape), parameters (..., *shape): scores (..., B, outputs)."""
        scores: Tensor = _apply(_Run, self, torch.is_grad_enabled(), x, *params)[0]
        return scores

    def images(self, x: Tensor) -> Tensor:
        """x as the kernels read it: channels last, with some room behind. A vector stays as it is."""
        shape = self.program.input_shape
        if tuple(x.shape[x.dim() - len(shape) :]) != shape:
            raise DataError(f"examples of shape {shape} are expected, but these end in {tuple(x.shape)}.")
        if self.program.layers[0].kind == EMBEDDING_MEAN:
            return self._words(x)
        x = x.to(torch.float32)
        if self.program.layers[0].kind != CONV and not self.program.channels_last:
            return x.contiguous().detach()  # a view: an autograd function may not return its own input
        once = [slice(size if stride else 1) for size, stride in zip(x.shape, x.stride(), strict=True)]
        own = x[tuple(once)].contiguous()  # what an expanded axis repeats is read once
        *lead, channels, height, width = own.shape
        made = torch.empty(own.numel() + SLACK)
        made[own.numel() :] = 0
        self._channels_last(own.data_ptr(), made.data_ptr(), math.prod(lead), channels, height * width)
        last = (*lead, height, width, channels) if self.program.channels_last else own.shape
        whole = x.movedim(-3, -1).shape if self.program.channels_last else x.shape
        return made[: own.numel()].view(last).expand(whole)

    def _words(self, x: Tensor) -> Tensor:
        """Row numbers of the embedding, as floats; checked, since the kernels do not look."""
        rows = self.shapes[self.program.layers[0].weight][0]
        lowest, highest = (int(word) for word in x.aminmax()) if x.numel() else (0, 0)
        if lowest < 0 or highest >= rows:
            raise DataError(f"words reach from {lowest} to {highest}, but the embedding has {rows} rows.")
        return x.to(torch.float32).contiguous().detach()

    def forward(self, x: Tensor, params: Sequence[Tensor], *, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(scores, tape, images): the last two are for `backward`, and empty unless they are to be kept."""
        lead, batch = self._lead(x), x.shape[-1 - len(self.program.input_shape)]
        items, images = math.prod(lead), self.images(x)
        scores = torch.empty(*lead, batch, self.program.num_outputs)
        tape = torch.empty(*lead, self._tape_size(*self._head, batch) if keep else 0)
        pointers, addresses = _addresses(images, len(lead)), self._table(params, len(lead))
        self._forward(
            *self._head, items, batch, pointers.ctypes.data, addresses.ctypes.data, len(self.sizes),
            scores.data_ptr(), tape.data_ptr() if keep else None,
        )  # fmt: skip
        return scores, tape, images if keep else images[..., :0]

    def backward(
        self, images: Tensor, tape: Tensor, d_scores: Tensor, params: Sequence[Tensor], *, input_too: bool
    ) -> tuple[Tensor, ...]:
        """(dx or an empty tensor, gradient of each parameter)."""
        lead, batch = self._lead(images), images.shape[-1 - len(self.program.input_shape)]
        grads = [torch.empty(*lead, *shape) for shape in self.shapes]
        dx = torch.empty(images.shape) if input_too else torch.empty(*lead, 0)
        tape, d_scores = tape.contiguous(), d_scores.contiguous()
        pointers, addresses = _addresses(images, len(lead)), self._table(params, len(lead))
        results = self._table(grads, len(lead))
        self._backward(
            *self._head, math.prod(lead), batch, pointers.ctypes.data, addresses.ctypes.data, self.sizes.ctypes.data,
            len(self.sizes), tape.data_ptr(), d_scores.data_ptr(), results.ctypes.data,
            dx.data_ptr() if input_too else None,
        )  # fmt: skip
        return (dx.movedim(-1, -3) if input_too and self.program.channels_last else dx), *grads

    def _lead(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[: x.dim() - 1 - len(self.program.input_shape)])

    def _table(self, params: Sequence[Tensor], lead: int) -> Pointers:
        """Addresses (items, parameters)."""
        return np.ascontiguousarray(np.stack([_addresses(tensor, lead) for tensor in params], axis=1))


def _addresses(tensor: Tensor, lead: int) -> Pointers:
    """Where each item of the first `lead` axes starts. The axes behind them lie together."""
    at = np.array([tensor.data_ptr()], dtype=np.int64)
    for size, stride in zip(tensor.shape[:lead], tensor.stride()[:lead], strict=True):
        at = (at[:, None] + 4 * stride * np.arange(size, dtype=np.int64)).reshape(-1)
    return at


def _dense(tensor: Tensor, lead: int) -> Tensor:
    """The same numbers with each item's axes lying together: itself, but for odd strides."""
    width = 1
    for size, stride in zip(reversed(tensor.shape[lead:]), reversed(tensor.stride()[lead:]), strict=True):
        if size > 1 and stride != width:
            return tensor.contiguous()
        width *= size
    return tensor


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # which has no types


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, keep: bool, x: Tensor, *params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lead = len(kernel._lead(x))
        for name, param, shape in zip(kernel.program.params, params, kernel.shapes, strict=True):
            if tuple(param.shape[lead:]) != shape:
                raise MessageError(
                    f"{name} has shape {tuple(param.shape[lead:])}, not {shape}: it is of another model."
                )
        return kernel.forward(x, [_dense(param, lead) for param in params], keep=keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kernel, _, _, *params = inputs
        _, tape, images = output
        ctx.kernel = kernel
        ctx.mark_non_differentiable(tape, images)
        ctx.save_for_backward(images, tape, *params)

    @staticmethod
    def backward(ctx: Any, d_scores: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        images, tape, *params = ctx.saved_tensors
        input_too = ctx.needs_input_grad[2]
        dx, *grads = _apply(_Back, ctx.kernel, input_too, images, tape, d_scores, *params)
        return None, None, dx if input_too else None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, keep: bool, *tensors: Tensor) -> Any:
        outputs = _apply(_Run, kernel, keep, *_axis_first(info.batch_size, in_dims[2:], tensors))
        return outputs, (0, 0, 0)


class _Back(torch.autograd.Function):
    """A function of its own, so that gradients can be mapped too: `vmap(grad(...))` gives one per example."""

    @staticmethod
    def forward(
        kernel: Kernel, input_too: bool, images: Tensor, tape: Tensor, d_scores: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        lead = len(kernel._lead(images))
        own = [_dense(param, lead) for param in params]
        return kernel.backward(images, tape, d_scores, own, input_too=input_too)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to remember: there are no second derivatives."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, input_too: bool, *tensors: Tensor) -> Any:
        outputs = _apply(_Back, kernel, input_too, *_axis_first(info.batch_size, in_dims[2:], tensors))
        return outputs, (0,) * len(outputs)


def _axis_first(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Every tensor with the mapped axis in front; one that has none is the same for all."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for dim, tensor in zip(in_dims, tensors, strict=True)
    ]
