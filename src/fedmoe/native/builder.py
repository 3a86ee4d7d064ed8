"""A program in the making: layers, what they read, and what may still become a part of them."""

import itertools
from typing import NamedTuple

import torch

from fedmoe.native.layers import INPUT, NONE, Layer, Size, Unsupported


class Value(NamedTuple):
    """What a step of the trace gives: the output of a layer, or the network's input."""

    layer: int  # a key of `Builder.layers`, or INPUT
    size: Size
    flat: bool
    shared: bool = False  # several steps read it, so that the layer must give just this


class Builder:
    """`current` is what the next step of the trace reads."""

    def __init__(self, given: Value, input_axes: int, names: dict[int, str]) -> None:
        self.current, self.input_axes, self.names = given, input_axes, names
        self.layers: dict[int, Layer] = {}  # in the order in which they run; `source` and `second` are keys
        self.params: list[str] = []
        self.keys = itertools.count()

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

    def unfinished(self, *kinds: int) -> Layer | None:
        """The layer that gave the current value, if it is of these kinds and nobody else reads that."""
        layer = self.layers.get(self.current.layer)
        return layer if layer is not None and layer.kind in kinds and not self.current.shared else None

    def finish(self, layer: Layer) -> None:
        """The layer that gave the current value does more than was known."""
        self.layers[self.current.layer] = layer
        self.current = self.current._replace(size=layer.output)

    def run_last(self, key: int) -> None:
        """A norm, and right before it its convolution, unless another layer has read that by now."""
        norm = self.layers.pop(key)
        if norm.source in self.layers and all(norm.source not in (o.source, o.second) for o in self.layers.values()):
            self.layers[norm.source] = self.layers.pop(norm.source)
        self.layers[key] = norm

    def parameter(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return -1
        name = self.names[id(tensor)]
        if name in self.params:
            raise Unsupported(f"{name} is used twice")
        if tensor.dtype != torch.float32:
            raise Unsupported(f"{name} is {tensor.dtype}")
        self.params.append(name)
        return len(self.params) - 1

    def expect(self, width: int) -> Size:
        if self.size[0] != width:
            raise Unsupported(f"a layer for {width} inputs would get {self.size[0]}")
        return self.size

    def layer(self, kind: int, output: Size, **numbers: int) -> Layer:
        return Layer(kind, *self.size, *output, **numbers, source=self.current.layer)

    def append(self, layer: Layer) -> None:
        if min(layer.output) < 1:
            raise Unsupported("the images are smaller than its kernels")
        key = next(self.keys)
        self.layers[key] = layer
        self.current = Value(key, layer.output, self.flat)
