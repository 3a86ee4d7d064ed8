"""Dense networks of a whole cohort in one batched matrix product per layer.

``vmap`` gives the same numbers for any module, but its Python costs several times the arithmetic of a small dense step.
Shape suffixes: S clients, B examples, I and O inputs and outputs of a layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedmoe.core_types import Tensors

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity)

Forward = Callable[[Tensors, Tensor], Tensor]


def cohort_forward(module: nn.Module) -> Forward | None:
    """``forward(params_S, x_SB...) -> scores_SBO`` for a chain of dense layers, or None for any other module."""
    if isinstance(module, nn.Linear):
        return _linear("", module)
    if type(module) is not nn.Sequential:
        return None
    layers = [_layer(f"{name}.", layer) for name, layer in module.named_children()]
    if not all(layers):
        return None

    def forward(params_S: Tensors, x: Tensor) -> Tensor:
        for layer in layers:
            assert layer is not None
            x = layer(params_S, x)
        return x

    return forward


def _layer(prefix: str, layer: nn.Module) -> Forward | None:
    if isinstance(layer, nn.Linear):
        return _linear(prefix, layer)
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda _params, x: x.flatten(2)
    if isinstance(layer, ELEMENTWISE):
        return lambda _params, x: layer(x)
    return None


def _linear(prefix: str, layer: nn.Linear) -> Forward:
    weight, bias = f"{prefix}weight", f"{prefix}bias"

    def forward(params_S: Tensors, x_SBI: Tensor) -> Tensor:
        # Weights on the left: their gradient comes out in their own layout, not turned round.
        weight_SOI, x_SIB = params_S[weight], x_SBI.transpose(1, 2)
        if layer.bias is None:
            return torch.bmm(weight_SOI, x_SIB).transpose(1, 2)
        return torch.baddbmm(params_S[bias].unsqueeze(2), weight_SOI, x_SIB).transpose(1, 2)

    return forward
