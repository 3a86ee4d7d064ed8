"""The parameters of a module: which are trained, which are frozen, and where the module holds them."""

from typing import Any

from torch import Tensor, nn

from fedmoe.core_types import Tensors

# The dicts in which modules hold a parameter, and its name there: several where weights are tied.
Places = dict[str, list[tuple[dict[str, Any], str]]]


def trained_parameters(module: nn.Module) -> Tensors:
    """Copies of what is trained, in the order of names: the order in which messages and files give them back."""
    return {name: p.detach().clone() for name, p in sorted(module.named_parameters()) if p.requires_grad}


def frozen_parameters(module: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in sorted(module.named_parameters()) if not p.requires_grad}


def constant_places(module: nn.Module) -> Places:
    """Of frozen parameters and buffers: what a module reads besides the weights that are trained."""
    named = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
    names = {id(tensor): name for name, tensor in {**named, **dict(module.named_buffers())}.items()}
    places: Places = {name: [] for name in names.values()}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for attribute, tensor in held.items():
                if id(tensor) in names:
                    places[names[id(tensor)]].append((held, attribute))
    return places


def inputs_of(layer: nn.Module) -> list[Tensor]:
    """A list that receives the input of `layer` at every call."""
    received: list[Tensor] = []

    def receive(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        received[:] = [inputs[0]]

    layer.register_forward_pre_hook(receive)
    return received


def parameter_places(module: nn.Module) -> Places:
    """Of the parameters that are trained; the frozen ones stay where they are."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    places: Places = {name: [] for name in names.values()}
    for part in module.modules():
        for attribute, parameter in part._parameters.items():
            if id(parameter) in names:
                places[names[id(parameter)]].append((part._parameters, attribute))
    return places
