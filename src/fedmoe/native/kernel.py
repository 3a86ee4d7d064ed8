"""A network's program on tensors: the native kernels as a differentiable function.

Every tensor may have leading axes (clients, experts): items are computed one after another, each by itself, so its
numbers do not depend on the others. `torch.func.vmap` adds such an axis, whatever function is being mapped.
"""

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.errors import DataError, MessageError
from fedmoe.native.build import library
from fedmoe.native.layers import CONV, INPUT, Program

Pointers = NDArray[np.int64]

# Kernels read up to a vector past the end of an image.
SLACK = 32


class Targets(NamedTuple):
    """What the gradients of single examples are of: any losses, by what these say of the scores; or cross-entropy."""

    d_scores: Tensor | None = None  # (..., B, outputs)
    labels: Tensor | None = None  # (..., B)
    offset: Tensor | None = None  # (..., outputs): added to the scores before the cross-entropy

    def check(self, shape: tuple[int, ...], outputs: int) -> None:
        if self.d_scores is not None:
            check_tensor("the gradient by the scores", self.d_scores, (*shape, outputs))
            return
        assert self.labels is not None
        check_tensor("the labels", self.labels, shape, torch.int64)
        if self.offset is not None:
            check_tensor("the offset of the scores", self.offset, (*shape[:-1], outputs))
        labels = self.labels.numpy()  # whose extremes cost a tenth of a tensor's
        lowest, highest = (labels.min(), labels.max()) if labels.size else (0, 0)
        if lowest < 0 or highest >= outputs:
            raise DataError(f"labels reach from {lowest} to {highest}, but the model has {outputs} scores.")


class Kernel:
    """One program, bound to the compiled library. Parameters that are constants belong to it, the others are given."""

    def __init__(
        self, program: Program, shapes: Sequence[tuple[int, ...]], constants: Mapping[str, Tensor] | None = None
    ) -> None:
        """`shapes` of all parameters, in the program's order; `constants` are the frozen ones, by name."""
        self.program, self.shapes = program, list(shapes)
        self.layers = np.array(program.layers, dtype=np.int64)
        self.sizes = np.array([math.prod(shape) for shape in shapes], dtype=np.int64)
        self._bind_constants(constants or {})
        lib = library()
        self._forward, self._backward, self._tape_size = lib.fedmoe_forward, lib.fedmoe_backward, lib.fedmoe_tape_size
        whole, where = ctypes.c_int64, ctypes.c_void_p
        head: list[Any] = [where, whole]
        self._forward.argtypes = [*head, whole, whole, where, where, whole, where, where]
        self._backward.argtypes = [*head, whole, whole, whole, where, where, where, whole, where, where, where, where]
        self._tape_size.argtypes = [*head, whole]
        self._clipped_sums = lib.fedmoe_clipped_sums
        of_items: list[Any] = [whole, whole, whole, where, where, where, whole]
        self._clipped_sums.argtypes = [*head, *of_items, *[where] * 5, ctypes.c_double, whole, where]
        self._clipped_sums.restype = None
        self._channels_last = lib.fedmoe_channels_last
        self._channels_last.argtypes, self._channels_last.restype = [where, where, whole, whole, whole], None
        self._tape_size.restype = whole
        self._forward.restype = self._backward.restype = None
        self._head = (self.layers.ctypes.data, len(self.layers))

    def _bind_constants(self, constants: Mapping[str, Tensor]) -> None:
        self.constants = {
            name: constants[name].detach().contiguous() for name in self.program.params if name in constants
        }
        for name, shape in zip(self.program.params, self.shapes, strict=True):
            if name in self.constants:
                check_tensor(f"the frozen {name}", self.constants[name], shape)
        trained = [j for j, name in enumerate(self.program.params) if name not in self.constants]
        self.trained_names = [self.program.params[j] for j in trained]
        self.trained_shapes = [self.shapes[j] for j in trained]
        self.first_trained = self.first_layer_of(self.trained_names)

    def first_layer_of(self, names: Collection[str]) -> int:
        """The first layer with one of these parameters: where the backward pass ends if they alone are trained."""
        wanted = {j for j, name in enumerate(self.program.params) if name in names}
        of_layer = [layer.params & wanted for layer in self.program.layers]
        return next((at for at, found in enumerate(of_layer) if found), len(of_layer))

    def __call__(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """x (..., B, *input_shape), parameters (..., *shape): scores (..., B, outputs)."""
        scores: Tensor = _apply(_Run, self, torch.is_grad_enabled(), x, *params)[0]
        return scores

    def check_examples(self, x: Tensor) -> None:
        """The kernels read without looking: refuse another shape, and words without a row in the embedding."""
        shape = self.program.input_shape
        if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
            raise DataError(f"examples of shape {shape} are expected, but these end in {tuple(x.shape)}.")
        if x.device.type != "cpu":
            raise DataError(f"the native kernels read examples on the CPU, but these are on {x.device.type}.")
        if not self.program.layers[0].reads_words:
            return
        if x.dtype.is_floating_point or x.dtype.is_complex:
            raise DataError(f"words are numbers of rows of the embedding, but these are {x.dtype}. Give integers.")
        rows = self.shapes[self.program.layers[0].weight][0]
        lowest, highest = (int(word) for word in x.aminmax()) if x.numel() else (0, 0)
        if lowest < 0 or highest >= rows:
            raise DataError(f"words reach from {lowest} to {highest}, but the embedding has {rows} rows.")

    @property
    def pads_images(self) -> bool:
        """Whether it reads images channels last or past their end; any other kernel reads those images as well."""
        of_input = (layer.kind for layer in self.program.layers if layer.source == INPUT)
        return CONV in of_input or self.program.channels_last

    def images(self, x: Tensor) -> Tensor:
        """x as the kernels read it: channels last, with some room behind. A vector stays as it is."""
        self.check_examples(x)
        x = x.to(torch.float32)  # also words: a program has at most 2^24 rows, which floats count exactly
        if not self.pads_images:
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

    def forward(self, x: Tensor, params: Sequence[Tensor], *, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(scores, tape, images): the last two are for `backward`, and empty unless they are to be kept."""
        lead, batch = self._lead(x), x.shape[-1 - len(self.program.input_shape)]
        self.check_params(params, lead)
        items, images = math.prod(lead), self.images(x)
        scores = torch.empty(*lead, batch, self.program.num_outputs)
        tape = torch.empty(*lead, self._tape_size(*self._head, batch) if keep else 0)
        pointers, addresses = _addresses(images, len(lead)), self._table(params, len(lead), items)
        self._forward(
            *self._head, items, batch, pointers.ctypes.data, addresses.ctypes.data, len(self.sizes),
            scores.data_ptr(), tape.data_ptr() if keep else None,
        )  # fmt: skip
        return scores, tape, images if keep else images[..., :0]

    def backward(
        self, images: Tensor, tape: Tensor, d_scores: Tensor, params: Sequence[Tensor], *, input_too: bool
    ) -> tuple[Tensor, ...]:
        """(dx or an empty tensor, gradient of each parameter that is no constant)."""
        lead, batch = self._lead(images), images.shape[-1 - len(self.program.input_shape)]
        self.check_params(params, lead)
        check_tensor("the gradient by the scores", d_scores, (*lead, batch, self.program.num_outputs))
        check_tensor("the tape", tape, (*lead, self._tape_size(*self._head, batch)))
        grads = [torch.empty(*lead, *shape) for shape in self.trained_shapes]
        dx = torch.empty(images.shape) if input_too else torch.empty(*lead, 0)
        tape, d_scores, items = tape.contiguous(), d_scores.contiguous(), math.prod(lead)
        pointers, addresses = _addresses(images, len(lead)), self._table(params, len(lead), items)
        unused = torch.empty(max([constant.numel() for constant in self.constants.values()], default=0))
        results = self._table(grads, len(lead), items, constants=dict.fromkeys(self.constants, unused))
        self._backward(
            *self._head, 0 if input_too else self.first_trained, items, batch, pointers.ctypes.data,
            addresses.ctypes.data, self.sizes.ctypes.data, len(self.sizes), tape.data_ptr(), d_scores.data_ptr(),
            results.ctypes.data, dx.data_ptr() if input_too else None,
        )  # fmt: skip
        return (dx.movedim(-1, -3) if input_too and self.program.channels_last else dx), *grads

    def clipped_sums(
        self,
        x: Tensor,
        params: Sequence[Tensor],
        real: Tensor,
        targets: "Targets",
        trained: Collection[str],
        clip_norm: float,
        *,
        per_tensor: bool,
    ) -> dict[str, Tensor]:
        """By parameter the sum of the gradients of single examples, each clipped, over those that are real (..., B).

        The names of `trained` alone count and are summed.
        """
        lead, batch = self._lead(x), x.shape[-1 - len(self.program.input_shape)]
        self.check_params(params, lead)
        targets.check((*lead, batch), self.program.num_outputs)
        check_tensor("which examples are real", real, (*lead, batch), torch.bool)
        sums = [torch.zeros(*lead, *shape) for shape in self.trained_shapes]
        images, real, items = self.images(x), real.contiguous(), math.prod(lead)
        given = Targets(*(part if part is None else part.contiguous() for part in targets))
        counts = np.array([name in trained for name in self.program.params], dtype=np.uint8)
        unused = torch.empty(max([constant.numel() for constant in self.constants.values()], default=0))
        pointers, addresses = _addresses(images, len(lead)), self._table(params, len(lead), items)
        results = self._table(sums, len(lead), items, constants=dict.fromkeys(self.constants, unused))
        self._clipped_sums(
            *self._head, self.first_layer_of(trained), items, batch, pointers.ctypes.data, addresses.ctypes.data,
            self.sizes.ctypes.data, len(self.sizes), real.data_ptr(),
            *(part if part is None else part.data_ptr() for part in given), counts.ctypes.data, clip_norm,
            per_tensor, results.ctypes.data,
        )  # fmt: skip
        return dict(zip(self.trained_names, sums, strict=True))

    def check_params(self, params: Sequence[Tensor], lead: tuple[int, ...]) -> None:
        for name, param, shape in zip(self.trained_names, params, self.trained_shapes, strict=True):
            check_tensor(name, param, (*lead, *shape))

    def _lead(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[: x.dim() - 1 - len(self.program.input_shape)])

    def _table(
        self, params: Sequence[Tensor], lead: int, items: int, constants: Mapping[str, Tensor] | None = None
    ) -> Pointers:
        """Addresses (items, parameters) in the program's order; constants are the same for all items."""
        own = dict(zip(self.trained_names, params, strict=True))
        same = self.constants if constants is None else constants
        table = np.empty((items, len(self.program.params)), dtype=np.int64)
        for j, name in enumerate(self.program.params):
            table[:, j] = _addresses(own[name], lead) if name in own else same[name].data_ptr()
        return table


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """The kernels read and write memory without looking, so whatever is given to them is compared here."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        found = f"{_label(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device.type}"
        raise MessageError(
            f"{name} is {found}, but {_label(dtype)} of shape {tuple(shape)} on cpu is expected: it is of another "
            "model. Train and predict with weights of the model that this run was made for."
        )


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
