"""From an `nn.Module` to the list of layers that the native kernels run; or the reason why they cannot.

The module's own forward is traced (torch.fx), so layers are found whether it is an `nn.Sequential` or plain code that
calls `F.relu` and `flatten`. Each layer reads the output of one before it, and sums of two are residual networks.
Anything but the layers below is left to PyTorch.
"""

import itertools
import math
import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedmoe.native import recurrent
from fedmoe.native.recurrent import READ_OUTS, Recurrence, recurrence_of

CONV, DENSE, MAX_POOL, AVERAGE_POOL, RELU, SIGMOID, TANH, TO_CHANNELS_FIRST, EMBEDDING_MEAN = range(9)
GROUP_NORM, ADD, SUBSAMPLE, LSTM = range(9, 13)

INPUT, NONE = -1, -2  # instead of the number of a layer

_NAMES = (
    "convolution",
    "dense",
    "max pool",
    "average pool",
    "relu",
    "sigmoid",
    "tanh",
    "channels first",
    "embedding mean",
    "group norm",
    "sum",
    "subsample",
    "lstm",
)

MOST_WORDS = 2**24  # words travel to the kernels as float32, beside all other inputs

Size = tuple[int, int, int]  # channels, height, width; a vector is (c, 1, 1)


class Layer(NamedTuple):
    """The same numbers in the same order as `struct Layer` in layer.h."""

    kind: int
    c: int
    h: int
    w: int
    oc: int
    oh: int
    ow: int
    ch: int = 1
    cw: int = 1
    kh: int = 1
    kw: int = 1
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    qh: int = 1
    qw: int = 1
    rh: int = 1
    rw: int = 1
    relu: int = 0
    weight: int = -1
    bias: int = -1
    source: int = INPUT
    second: int = NONE
    groups: int = 1
    epsilon_bits: int = 0

    @property
    def output(self) -> Size:
        return self.oc, self.oh, self.ow

    @property
    def reads_words(self) -> bool:
        return self.kind in (EMBEDDING_MEAN, LSTM) and self.weight >= 0

    @property
    def params(self) -> set[int]:
        """Of an LSTM `bias` is the first parameter of its cells, of which each has its biases or none."""
        if self.kind == LSTM:
            return {self.weight, *range(self.bias, self.bias + self.kh * self.kw * (4 if self.pw else 2))} - {-1}
        return {self.weight, self.bias} - {-1}

    def describe(self) -> str:
        name = _NAMES[self.kind]
        if self.kind == LSTM:
            words = f"embedding {self.qh} + " if self.reads_words else ""
            way = " in both directions" if self.kw == 2 else ""
            deep = f", {self.kh} levels" if self.kh > 1 else ""
            return f"{words}{name} {self.oc // self.kw}{way}{deep}, {READ_OUTS[self.sh]} -> {self.oc}"
        kernel = f" {self.kh}x{self.kw}" if self.kind in (CONV, MAX_POOL, AVERAGE_POOL) else ""
        pool = f" + max pool {self.qh}x{self.qw}" if self.qh * self.qw > 1 else ""
        pool += f" of {self.groups}" if self.kind == GROUP_NORM else ""
        pool += " + shortcut" if self.kind == GROUP_NORM and self.second != NONE else ""
        size = "x".join(str(length) for length in self.output if length > 1) or "1"
        return f"{name}{kernel}{pool}{' + relu' if self.relu else ''} -> {size}"


class Program(NamedTuple):
    """`params` names the parameters in the order of the numbers in `weight` and `bias`."""

    layers: tuple[Layer, ...]
    params: tuple[str, ...]
    input_shape: tuple[int, ...]
    channels_last: bool  # images of several channels are given to the kernels as (height, width, channels)
    num_outputs: int


class Unsupported(Exception):  # noqa: N818 (not an error: PyTorch takes over)
    """Why a module is no chain of the layers that the kernels know."""


def program_of(module: nn.Module, input_shape: tuple[int, ...]) -> Program:
    """Raises Unsupported with the reason."""
    if len(input_shape) not in (1, 2, 3):
        raise Unsupported(f"examples of shape {input_shape} are neither vectors nor images")
    size = cast(Size, (*input_shape, 1, 1)[:3])
    builder = _Builder(_Value(INPUT, size, flat=len(input_shape) == 1), len(input_shape), _names(module))
    output = builder.run(_traced(module))
    if not output.flat or not builder.layers:
        raise Unsupported("its output is not a vector per example")
    channels_last = len(input_shape) == 3 and size[0] > 1 and size[1] * size[2] > 1
    return Program(builder.numbered_layers(), tuple(builder.params), input_shape, channels_last, output.size[0])


def without_output(program: Program) -> tuple[Program, tuple[str, str | None]]:
    """The program up to the input of its last layer, and the names of that layer's weight and bias."""
    *body, last = program.layers
    if last.kind != DENSE or last.relu or not body or last.source != len(body) - 1:
        raise Unsupported("its last layer is not a plain dense one behind others")
    names = program.params[last.weight], program.params[last.bias] if last.bias >= 0 else None
    kept = tuple(name for name in program.params if name not in names)
    return program._replace(layers=tuple(body), params=kept, num_outputs=last.c), names


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _traced(module: nn.Module) -> fx.GraphModule:
    try:
        traced = recurrent.traced(nn.Sequential(module))  # within another one a single layer is a step too
    except Exception as error:  # whatever user code raises when it is traced
        raise Unsupported(f"its forward cannot be traced ({type(error).__name__})") from error
    return traced


class _Value(NamedTuple):
    """What a step of the trace gives: the output of a layer, or the network's input."""

    layer: int  # a key of `_Builder.layers`, or INPUT
    size: Size
    flat: bool
    shared: bool = False  # several steps read it, so that the layer must give just this


class _Builder:
    """One step of the trace after another becomes a layer, or a part of the layer before it."""

    def __init__(self, given: _Value, input_axes: int, names: dict[int, str]) -> None:
        self.current, self.input_axes, self.names = given, input_axes, names
        self.layers: dict[int, Layer] = {}  # in the order in which they run; `source` and `second` are keys
        self.params: list[str] = []
        self.keys = itertools.count()

    def run(self, traced: fx.GraphModule) -> _Value:
        """The network's output."""
        values: dict[fx.Node, _Value] = {}
        for node in traced.graph.nodes:
            if node.op == "output":
                if node.args[0] not in values:
                    raise Unsupported("it returns something else than one tensor")
                return values[node.args[0]]
            if node.op == "get_attr" or (node.op == "placeholder" and values):
                raise Unsupported("it reads something else than its layers' outputs")
            if node.op != "placeholder":
                self._step(node, [values[before] for before in node.all_input_nodes], traced)
            values[node] = self.current._replace(shared=self.current.shared or len(node.users) > 1)
        raise Unsupported("it has no output")

    def numbered_layers(self) -> tuple[Layer, ...]:
        number = {key: place for place, key in enumerate(self.layers)} | {INPUT: INPUT, NONE: NONE}
        return tuple(
            layer._replace(source=number[layer.source], second=number[layer.second]) for layer in self.layers.values()
        )

    @property
    def size(self) -> Size:
        return self.current.size

    @property
    def flat(self) -> bool:
        return self.current.flat

    def _step(self, node: fx.Node, inputs: list[_Value], traced: fx.GraphModule) -> None:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.target in (operator.add, operator.iadd, torch.add) or (node.op, node.target) == ("call_method", "add"):
            self._add(node, inputs)
        elif len(inputs) != 1:
            raise Unsupported(f"it has a {_label(node.target)} of several layers' outputs")
        else:
            self.current = inputs[0]
            self.add(node, module)

    def _unfinished(self, *kinds: int) -> Layer | None:
        """The layer that gave the current value, if it is of these kinds and nobody else reads that."""
        layer = self.layers.get(self.current.layer)
        return layer if layer is not None and layer.kind in kinds and not self.current.shared else None

    def _finish(self, layer: Layer) -> None:
        """The layer that gave the current value does more than was known."""
        self.layers[self.current.layer] = layer
        self.current = self.current._replace(size=layer.output)

    def add(self, node: fx.Node, module: nn.Module | None) -> None:
        step = module if module is not None else node.target
        if (recurrence := recurrence_of(module)) is not None:
            self._recurrence(recurrence)
        elif isinstance(module, nn.Identity) or _is_nothing(module):
            pass
        elif self.input_axes == 2 and self.current.layer == INPUT:
            raise Unsupported(f"examples of shape {self.size[:2]} are neither vectors nor images, nor for an LSTM")
        elif isinstance(module, nn.Conv2d):
            self._conv(module)
        elif isinstance(module, nn.Linear):
            self._linear(module)
        elif isinstance(module, nn.EmbeddingBag):
            self._embedding_mean(module)
        elif isinstance(module, nn.GroupNorm):
            self._norm(module, self._expect(module.num_channels), module.num_groups)
        elif isinstance(module, nn.LayerNorm):
            self._layer_norm(module)
        elif isinstance(module, nn.MaxPool2d):
            self._max_pool(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
        elif isinstance(module, nn.AvgPool2d):
            self._average_pool(module)
        elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            self._window(AVERAGE_POOL, self.size[1:], self.size[1:])
        elif step in (torch.mean, "mean"):
            self._mean(node)
        elif step is operator.getitem:
            self._every_other_pixel(node)
        elif step is F.pad:
            self._pad_channels(node)
        elif _is(step, (nn.ReLU,), (F.relu, torch.relu), "relu", node):
            self._relu()
        elif _is(step, (nn.Sigmoid,), (F.sigmoid, torch.sigmoid), "sigmoid", node):
            self._elementwise(SIGMOID)
        elif _is(step, (nn.Tanh,), (F.tanh, torch.tanh), "tanh", node):
            self._elementwise(TANH)
        elif step is F.max_pool2d:
            self._pool_call(node)
        elif self._flattens(step, node):
            self._flatten()
        else:
            raise Unsupported(f"it has a {_label(step)}")

    def _add(self, node: fx.Node, inputs: list[_Value]) -> None:
        if node.kwargs or len(node.args) != 2 or not all(isinstance(part, fx.Node) for part in node.args):
            raise Unsupported("it adds something else than two layers' outputs")
        first, second = inputs[0], inputs[-1]
        if (first.size, first.flat) != (second.size, second.flat):
            raise Unsupported(f"it adds outputs of sizes {first.size} and {second.size}")
        for self.current, other in ((second, first), (first, second)):
            norm = self._unfinished(GROUP_NORM)
            if norm and norm.second == NONE and not norm.relu and other != self.current:
                self._run_last(self.current.layer)  # when both are there
                self._finish(norm._replace(second=other.layer))
                return
        self._append(Layer(ADD, *first.size, *first.size, source=first.layer, second=second.layer))

    def _run_last(self, key: int) -> None:
        """A norm, and right before it its convolution, unless another layer has read that by now."""
        norm = self.layers.pop(key)
        if norm.source in self.layers and all(norm.source not in (o.source, o.second) for o in self.layers.values()):
            self.layers[norm.source] = self.layers.pop(norm.source)
        self.layers[key] = norm

    def _parameter(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return -1
        name = self.names[id(tensor)]
        if name in self.params:
            raise Unsupported(f"{name} is used twice")
        if tensor.dtype != torch.float32:
            raise Unsupported(f"{name} is {tensor.dtype}")
        self.params.append(name)
        return len(self.params) - 1

    def _conv(self, conv: nn.Conv2d) -> None:
        if self.flat or conv.groups != 1 or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
            raise Unsupported("it has a convolution with groups, dilation or a special padding")
        if isinstance(conv.padding, str):
            raise Unsupported(f"it has a convolution with padding={conv.padding!r}")
        _, h, w = self._expect(conv.in_channels)
        (kh, kw), (sh, sw), (ph, pw) = conv.kernel_size, conv.stride, conv.padding
        oh, ow = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
        where = self._parameter(conv.weight), self._parameter(conv.bias)
        layer = self._layer(CONV, (conv.out_channels, oh, ow), ch=oh, cw=ow, kh=kh, kw=kw, sh=sh, sw=sw, ph=ph, pw=pw)
        self._append(layer._replace(weight=where[0], bias=where[1]))

    def _linear(self, linear: nn.Linear) -> None:
        if not self.flat:
            raise Unsupported("it has a dense layer on the last axis of an image")
        self._expect(linear.in_features)
        where = self._parameter(linear.weight), self._parameter(linear.bias)
        self._append(self._layer(DENSE, (linear.out_features, 1, 1), weight=where[0], bias=where[1]))

    def _embedding_mean(self, bag: nn.EmbeddingBag) -> None:
        if self.current.layer != INPUT or not self.flat:
            raise Unsupported("it has an embedding of something else than its input, a vector of words")
        if bag.mode != "mean" or bag.padding_idx is not None or bag.max_norm is not None or bag.sparse:
            raise Unsupported("it has an EmbeddingBag with more to it than a mean")
        if bag.num_embeddings > MOST_WORDS:
            raise Unsupported(f"it has an EmbeddingBag of {bag.num_embeddings} rows, more than float32 counts exactly")
        at = self._parameter(bag.weight)
        self._append(self._layer(EMBEDDING_MEAN, (bag.embedding_dim, 1, 1), weight=at))

    def _recurrence(self, found: Recurrence) -> None:
        """The fields of a layer as `Recurrent` in lstm_rows.h reads them."""
        if found.obstacle:
            raise Unsupported(f"it has {found.obstacle}")
        words = found.embedding
        if self.current.layer != INPUT or self.input_axes != (2 if words is None else 1):
            raise Unsupported("it has an LSTM of something else than its input, words or vectors one after another")
        if words is not None and words.num_embeddings > MOST_WORDS:
            raise Unsupported(f"it has an Embedding of {words.num_embeddings} rows, more than float32 counts exactly")
        embedded = self.size[1] if words is None else words.embedding_dim
        if embedded != found.lstms[0].input_size:
            raise Unsupported(f"an LSTM for {found.lstms[0].input_size} inputs would get {embedded}")
        at = self._parameter(None if words is None else words.weight)
        first, *_ = [self._parameter(parameter) for parameter in found.parameters()]
        frozen_row = -1 if words is None or words.padding_idx is None else words.padding_idx
        layer = self._layer(
            LSTM, (found.width, 1, 1), kh=found.levels, kw=found.directions, sh=found.read_out, sw=int(found.ragged),
            ph=int(found.lstms[0].bidirectional), pw=int(found.lstms[0].bias), qh=embedded, qw=frozen_row, weight=at,
            bias=first,
        )  # fmt: skip
        self._append(layer)
        self.current = self.current._replace(flat=True)
        if found.head is not None:
            self._linear(found.head)

    def _norm(self, norm: nn.GroupNorm | nn.LayerNorm, size: Size, groups: int) -> None:
        where = self._parameter(norm.weight), self._parameter(norm.bias)
        layer = self._layer(GROUP_NORM, size, groups=groups, weight=where[0], bias=where[1])
        self._append(layer._replace(epsilon_bits=struct.unpack("<q", struct.pack("<d", norm.eps))[0]))

    def _layer_norm(self, norm: nn.LayerNorm) -> None:
        if not self.flat or len(norm.normalized_shape) != 1:
            raise Unsupported("it has a LayerNorm of something else than a vector")
        self._norm(norm, self._expect(norm.normalized_shape[0]), groups=1)

    def _relu(self) -> None:
        last = self._unfinished(CONV, DENSE, GROUP_NORM, ADD)
        if last is not None and not last.relu:
            self._finish(last._replace(relu=1))  # relu and max pooling commute, so either order is one block
        else:
            self._elementwise(RELU)

    def _elementwise(self, kind: int) -> None:
        self._append(self._layer(kind, self.size))

    def _pool_call(self, node: fx.Node) -> None:
        given = _arguments(node, "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        kernel = given["kernel_size"]
        self._max_pool(
            kernel, given.get("stride") or kernel, given.get("padding", 0), given.get("dilation", 1),
            given.get("ceil_mode", False),
        )  # fmt: skip

    def _max_pool(self, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> None:
        if _pair(padding) != (0, 0) or _pair(dilation) != (1, 1) or ceil_mode or math.prod(_pair(kernel)) > 200:
            raise Unsupported("it has a max pooling with padding, dilation, ceil_mode or a very large window")
        last = self._unfinished(CONV)
        if last is not None and last.output == (last.oc, last.ch, last.cw):
            (qh, qw), (rh, rw) = _pair(kernel), _pair(stride)
            oh, ow = (last.ch - qh) // rh + 1, (last.cw - qw) // rw + 1
            self._finish(last._replace(oh=oh, ow=ow, qh=qh, qw=qw, rh=rh, rw=rw))
        else:
            self._window(MAX_POOL, _pair(kernel), _pair(stride))

    def _average_pool(self, pool: nn.AvgPool2d) -> None:
        if _pair(pool.padding) != (0, 0) or pool.ceil_mode or pool.divisor_override:
            raise Unsupported("it has an average pooling with padding, ceil_mode or divisor_override")
        self._window(AVERAGE_POOL, _pair(pool.kernel_size), _pair(pool.stride))

    def _mean(self, node: fx.Node) -> None:
        """Over all pixels of an image."""
        given = _arguments(node, "input", "dim", "keepdim")
        axes = given.get("dim")
        if self.flat or not isinstance(axes, tuple | list) or sorted(axis % 4 for axis in axes) != [2, 3]:
            raise Unsupported("it has a mean over something else than all pixels")
        self._window(AVERAGE_POOL, self.size[1:], self.size[1:])
        if not given.get("keepdim", False):
            self._flatten()

    def _every_other_pixel(self, node: fx.Node) -> None:
        """x[:, :, ::s, ::s]"""
        index: Any = node.args[1]
        whole = isinstance(index, tuple) and len(index) == 4 and all(
            isinstance(part, slice) and part.start is None and part.stop is None for part in index
        )  # fmt: skip
        steps = [part.step or 1 for part in index] if whole else []
        if self.flat or steps[:2] != [1, 1] or not all(isinstance(step, int) for step in steps):
            raise Unsupported("it has an index other than x[:, :, ::s, ::s] of an image")
        c, h, w = self.size
        sh, sw = steps[2:]
        self._append(self._layer(SUBSAMPLE, (c, -(-h // sh), -(-w // sw)), sh=sh, sw=sw))

    def _pad_channels(self, node: fx.Node) -> None:
        """F.pad(x, (0, 0, 0, 0, front, behind)): channels of zeros."""
        given = _arguments(node, "input", "pad", "mode", "value")
        pad, plain = given["pad"], given.get("mode", "constant") == "constant" and not given.get("value")
        if self.flat or not plain or len(pad) != 6 or any(pad[:4]) or min(pad) < 0:
            raise Unsupported("it has a padding of something else than channels by zeros")
        c, h, w = self.size
        last = self._unfinished(SUBSAMPLE)
        if last is not None and last.oc == last.c:
            self._finish(last._replace(oc=c + pad[4] + pad[5], ph=pad[4]))
        else:
            self._append(self._layer(SUBSAMPLE, (c + pad[4] + pad[5], h, w), ph=pad[4]))

    def _window(self, kind: int, kernel: tuple[int, ...], stride: tuple[int, ...]) -> None:
        if self.flat:
            raise Unsupported("it pools vectors")
        c, h, w = self.size
        (kh, kw), (sh, sw) = kernel, stride
        self._append(self._layer(kind, (c, (h - kh) // sh + 1, (w - kw) // sw + 1), kh=kh, kw=kw, sh=sh, sw=sw))

    def _flattens(self, step: Any, node: fx.Node) -> bool:
        if isinstance(step, nn.Flatten):
            return (step.start_dim, step.end_dim) == (1, -1)
        arguments = (*node.args[1:], *node.kwargs.values())
        return (step is torch.flatten or step == "flatten") and arguments in ((1,), (1, -1))

    def _flatten(self) -> None:
        c, h, w = self.size
        if not self.flat and c > 1 and h * w > 1:
            self._append(self._layer(TO_CHANNELS_FIRST, self.size))
        self.current = self.current._replace(size=(c * h * w, 1, 1), flat=True)

    def _expect(self, width: int) -> Size:
        if self.size[0] != width:
            raise Unsupported(f"a layer for {width} inputs would get {self.size[0]}")
        return self.size

    def _layer(self, kind: int, output: Size, **numbers: int) -> Layer:
        return Layer(kind, *self.size, *output, **numbers, source=self.current.layer)

    def _append(self, layer: Layer) -> None:
        if min(layer.output) < 1:
            raise Unsupported("the images are smaller than its kernels")
        key = next(self.keys)
        self.layers[key] = layer
        self.current = _Value(key, layer.output, self.flat)


def _is(
    step: Any, modules: tuple[type, ...], functions: tuple[Callable[..., Any], ...], method: str, node: fx.Node
) -> bool:
    return isinstance(step, modules) or step in functions or (node.op == "call_method" and step == method)


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _is_nothing(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Dropout) and module.p == 0


def _label(step: Any) -> str:
    return type(step).__name__ if isinstance(step, nn.Module) else str(getattr(step, "__name__", step))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (operator.getitem(value, 0), operator.getitem(value, 1))
