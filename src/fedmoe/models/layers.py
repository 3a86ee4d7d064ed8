"""A network as a chain of layers, and a cut between two of them.

A layer is what has weights that are trained: rows of layers (`nn.Sequential`, and the network itself) are opened,
anything else, such as a residual block or an LSTM, is one layer. The order is that of declaration.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.models.network import Network


class LayerWeights(NamedTuple):
    """One layer, by name."""

    name: str
    weights: tuple[str, ...]  # their names in the network


def layers_of(network: Network) -> list[LayerWeights]:
    """Layers in order. Weights that belong to no layer, such as a bare parameter of the network, are not among them."""
    names = {id(parameter): name for name, parameter in network.module.named_parameters()}
    layers = []
    for name, layer in _opened(network.module, ""):
        weights = {names[id(parameter)] for parameter in layer.parameters()} - network.frozen.keys()
        if weights:
            layers.append(LayerWeights(name, tuple(sorted(weights))))
    return layers


def _opened(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        if type(child) is nn.Sequential:
            found += _opened(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            found.append((f"{prefix}{name}", child))
    return found


def representation(network: Network, layer: str, params: Tensors, x: Tensor) -> Tensor:
    """The input of `layer`: what the layers before it make of x."""
    heard: list[Tensor] = []
    hook = network.module.get_submodule(layer).register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    try:
        network.ask_module(params, x)
    finally:
        hook.remove()
    return heard[0]


def answer_from(network: Network, layer: str, params: Tensors, x: Tensor, given: Tensor) -> Tensor:
    """The network's answer with `given` in place of what `layer` would read. x only gives the shapes."""
    hook = network.module.get_submodule(layer).register_forward_pre_hook(lambda _, inputs: (given, *inputs[1:]))
    try:
        return network.ask_module(params, x)
    finally:
        hook.remove()


def all_passes_through(network: Network, layer: str, params: Tensors, x: Tensor) -> bool:
    """Whether the answer depends on x through the input of `layer` alone: no shortcut leads around it."""
    with torch.no_grad():
        given = representation(network, layer, params, x)
        return torch.equal(
            network.ask_module(params, x), answer_from(network, layer, params, torch.zeros_like(x), given)
        )
