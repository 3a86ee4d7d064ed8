"""From an `nn.Module` to the list of layers that the native kernels run; or the reason why they cannot.

The module's own forward is traced (torch.fx), so layers are found whether it is an `nn.Sequential` or plain code that
calls `F.relu` and `flatten`. Each layer reads the output of one before it, and sums of two are residual networks.
Anything but the layers below is left to PyTorch.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedmoe.native import recurrent
from fedmoe.native.builder import Builder, Value
from fedmoe.native.image_steps import (
    add_average_pool,
    add_conv,
    add_every_other_pixel,
    add_flatten,
    add_max_pool,
    add_mean,
    add_padded_channels,
    add_pool_call,
    add_window,
    flattens,
)
from fedmoe.native.layers import AVERAGE_POOL, DENSE, INPUT, SIGMOID, TANH, Program, Size, Unsupported
from fedmoe.native.recurrent import recurrence_of
from fedmoe.native.vector_steps import (
    add_elementwise,
    add_embedding_mean,
    add_layer_norm,
    add_linear,
    add_norm,
    add_recurrence,
    add_relu,
    add_sum,
)


def program_of(module: nn.Module, input_shape: tuple[int, ...]) -> Program:
    """Raises Unsupported with the reason."""
    if len(input_shape) not in (1, 2, 3):
        raise Unsupported(f"examples of shape {input_shape} are neither vectors nor images")
    size = cast(Size, (*input_shape, 1, 1)[:3])
    builder = Builder(Value(INPUT, size, flat=len(input_shape) == 1), len(input_shape), _names(module))
    output = _run(builder, _traced(module))
    if not output.flat or not builder.layers:
        raise Unsupported("its output is not a vector per example")
    if unused := next(
        (name for name, p in module.named_parameters() if p.requires_grad and name not in builder.params), ""
    ):
        raise Unsupported(f"its forward does not use {unused}")
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


def _run(builder: Builder, traced: fx.GraphModule) -> Value:
    """The network's output."""
    values: dict[fx.Node, Value] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            if node.args[0] not in values:
                raise Unsupported("it returns something else than one tensor")
            return values[node.args[0]]
        if node.op == "get_attr" or (node.op == "placeholder" and values):
            raise Unsupported("it reads something else than its layers' outputs")
        if node.op != "placeholder":
            _add_step(builder, node, [values[before] for before in node.all_input_nodes], traced)
        values[node] = builder.current._replace(shared=builder.current.shared or len(node.users) > 1)
    raise Unsupported("it has no output")


def _add_step(builder: Builder, node: fx.Node, inputs: list[Value], traced: fx.GraphModule) -> None:
    module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
    if node.target in (operator.add, operator.iadd, torch.add) or (node.op, node.target) == ("call_method", "add"):
        add_sum(builder, node, inputs)
    elif len(inputs) != 1:
        raise Unsupported(f"it has a {_label(node.target)} of several layers' outputs")
    else:
        builder.current = inputs[0]
        _add_layer(builder, node, module)


def _add_layer(builder: Builder, node: fx.Node, module: nn.Module | None) -> None:
    step = module if module is not None else node.target
    if (recurrence := recurrence_of(module)) is not None:
        add_recurrence(builder, recurrence)
    elif isinstance(module, nn.Identity) or _is_nothing(module):
        pass
    elif builder.input_axes == 2 and builder.current.layer == INPUT:
        raise Unsupported(f"examples of shape {builder.size[:2]} are neither vectors nor images, nor for an LSTM")
    elif isinstance(module, nn.Conv2d):
        add_conv(builder, module)
    elif isinstance(module, nn.Linear):
        add_linear(builder, module)
    elif isinstance(module, nn.EmbeddingBag):
        add_embedding_mean(builder, module)
    elif isinstance(module, nn.GroupNorm):
        add_norm(builder, module, builder.expect(module.num_channels), module.num_groups)
    elif isinstance(module, nn.LayerNorm):
        add_layer_norm(builder, module)
    elif isinstance(module, nn.MaxPool2d):
        add_max_pool(builder, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    elif isinstance(module, nn.AvgPool2d):
        add_average_pool(builder, module)
    elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
        add_window(builder, AVERAGE_POOL, builder.size[1:], builder.size[1:])
    elif step in (torch.mean, "mean"):
        add_mean(builder, node)
    elif step is operator.getitem:
        add_every_other_pixel(builder, node)
    elif step is F.pad:
        add_padded_channels(builder, node)
    elif _is(step, (nn.ReLU,), (F.relu, torch.relu), "relu", node):
        add_relu(builder)
    elif _is(step, (nn.Sigmoid,), (F.sigmoid, torch.sigmoid), "sigmoid", node):
        add_elementwise(builder, SIGMOID)
    elif _is(step, (nn.Tanh,), (F.tanh, torch.tanh), "tanh", node):
        add_elementwise(builder, TANH)
    elif step is F.max_pool2d:
        add_pool_call(builder, node)
    elif flattens(step, node):
        add_flatten(builder)
    else:
        raise Unsupported(f"it has a {_label(step)}")


def _is(
    step: Any, modules: tuple[type, ...], functions: tuple[Callable[..., Any], ...], method: str, node: fx.Node
) -> bool:
    return isinstance(step, modules) or step in functions or (node.op == "call_method" and step == method)


def _is_nothing(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Dropout) and module.p == 0


def _label(step: Any) -> str:
    return type(step).__name__ if isinstance(step, nn.Module) else str(getattr(step, "__name__", step))
