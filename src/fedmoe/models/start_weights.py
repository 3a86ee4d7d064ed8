"""Start from given weights: a safetensors file fills a network before anybody trains it."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.network import ModuleOrFactory
from fedmoe.storage.files import write_atomically


def read_weights(path: Path, key: str) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file and the notes in it; `key` is the setting that names the file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={str(path)!r} cannot be read as safetensors: {error}. Name a file of weights, such as one that "
            "'fedmoe pretrain' or safetensors.torch.save_file wrote."
        ) from error


def write_weights(path: Path, weights: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in weights.items()}, dict(notes)))


def starting_from(source: ModuleOrFactory, weights: Tensors, what: str, noise: float = 0.0) -> ModuleOrFactory:
    """The same module or factory, whose every copy starts from `weights`; `what` names them in an error.

    With `noise`, each trained weight of a copy moves at random by that share of its tensor's standard deviation, so
    that experts which would never part otherwise start apart.
    """
    if isinstance(source, nn.Module):
        return filled(copy.deepcopy(source), weights, what, 0.0)
    make: Callable[[], nn.Module] = source
    return lambda: filled(make(), weights, what, noise)


def filled(module: nn.Module, weights: Tensors, what: str, noise: float) -> nn.Module:
    """The module with these weights. Names and shapes must be the module's own, whole and nothing else."""
    own = module.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights or name not in own:
            where = "has no" if name not in weights else "has a tensor that the model lacks,"
            raise ConfigError(f"{what} {where} {name!r}: these are weights of another model. {_own_names(own)}")
        if own[name].shape != weights[name].shape:
            raise ConfigError(
                f"{what}: {name!r} has shape {tuple(weights[name].shape)}, but the model needs "
                f"{tuple(own[name].shape)}. Choose the model that these weights were trained for; its input shape and "
                "its number of classes count too."
            )
        if not bool(weights[name].isfinite().all()):
            raise ConfigError(f"{what}: {name!r} holds values that are no numbers. Train these weights again.")
    module.load_state_dict({name: weights[name].to(own[name].dtype) for name in own})
    if noise:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.numel() > 1:
                    parameter.add_(torch.randn_like(parameter) * parameter.std(), alpha=noise)
    return module


def _own_names(own: Mapping[str, Tensor]) -> str:
    return f"The model has: {', '.join(own)}."
