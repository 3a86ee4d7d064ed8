"""What can be wrong with a module of the user's own, said before anything is trained."""

import inspect

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmoe.errors import ConfigError

Norm = nn.modules.batchnorm._NormBase
BatchNorm = nn.modules.batchnorm._BatchNorm


def build_module(factory: object, name: str, seed: int) -> nn.Module:
    """What a factory returns when random numbers start from `seed`; it is called without arguments."""
    if not callable(factory):
        raise ConfigError(f"{name}= is a {type(factory).__name__}. Give an nn.Module, or a function that returns one.")
    _require_no_arguments(factory, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: object = factory()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the factory of the {name} returned a {type(made).__name__}. Let it return an nn.Module.")
    return made


def require_initialised(module: nn.Module, name: str) -> None:
    """Every client must start from weights that are there."""
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"{path!r} of the {name} belongs to a lazy layer, which has no weights yet. Say the layer's input "
                "size, or call the module with some rows before it is passed."
            )


def _require_no_arguments(factory: object, name: str) -> None:
    try:
        inspect.signature(factory).bind()  # type: ignore[arg-type]
    except ValueError:  # something built in that does not say its arguments
        return
    except TypeError as error:
        called = getattr(factory, "__qualname__", type(factory).__qualname__)
        raise ConfigError(
            f"{name}={called} cannot be called without arguments ({error}). Give a factory that needs none: "
            f"{name}=lambda: {called}(...)."
        ) from error


def layers_with_statistics(module: nn.Module, name: str) -> list[nn.Module]:
    """Layers that keep statistics of the data. In eval mode these are constants, the same for everyone."""
    found: list[nn.Module] = []
    for path, layer in module.named_modules():
        if not isinstance(layer, Norm) or not (layer.track_running_stats or isinstance(layer, BatchNorm)):
            continue
        if layer.training or layer.running_mean is None:
            raise ConfigError(
                f"layer {path!r} of the {name} is a {type(layer).__name__}{' in training mode' * layer.training}: its "
                "statistics do not average over clients and mix the examples of a batch. Convert the module with "
                "fedmoe.models.to_group_norm(module), or use nn.LayerNorm; to keep pretrained statistics as constants, "
                "put it in eval mode: module.eval()."
            )
        found.append(layer)
    return found


def cannot_read(name: str, x: Tensor, error: Exception) -> str:
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    integers = (
        ""
        if x.is_floating_point()
        else f" x holds whole numbers ({x.dtype}): give floats (x.float()), unless they are ids for an nn.Embedding."
    )
    return (
        f"the {name} cannot read a batch of shape {tuple(x.shape)}: {kind}{error}. "
        f"Make its first layer fit the data, or reshape the data.{integers}"
    )


def require_scores(name: str, output: object, x: Tensor, num_outputs: int) -> None:
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"the {name} returns a {type(output).__name__}, not a tensor. Let its forward return the scores alone, "
            "such as the first part of what it returns now."
        )
    if (shape := tuple(output.shape)) != (len(x), num_outputs):
        raise ConfigError(
            f"the {name} returns shape {shape} for a batch of shape {tuple(x.shape)}; it must return "
            f"({len(x)}, {num_outputs}): one unnormalised score per {'class' if num_outputs > 1 else 'example'}. "
            "Change its last layer."
        )
