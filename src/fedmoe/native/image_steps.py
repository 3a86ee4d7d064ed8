"""Steps of a trace that images take: convolutions, poolings, every other pixel, padded channels."""

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from fedmoe.native.builder import Builder
from fedmoe.native.layers import AVERAGE_POOL, CONV, MAX_POOL, SUBSAMPLE, TO_CHANNELS_FIRST, Unsupported


def add_conv(builder: Builder, conv: nn.Conv2d) -> None:
    if builder.flat or conv.groups != 1 or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        raise Unsupported("it has a convolution with groups, dilation or a special padding")
    if isinstance(conv.padding, str):
        raise Unsupported(f"it has a convolution with padding={conv.padding!r}")
    _, h, w = builder.expect(conv.in_channels)
    (kh, kw), (sh, sw), (ph, pw) = conv.kernel_size, conv.stride, conv.padding
    oh, ow = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
    where = builder.parameter(conv.weight), builder.parameter(conv.bias)
    layer = builder.layer(CONV, (conv.out_channels, oh, ow), ch=oh, cw=ow, kh=kh, kw=kw, sh=sh, sw=sw, ph=ph, pw=pw)
    builder.append(layer._replace(weight=where[0], bias=where[1]))


def add_pool_call(builder: Builder, node: fx.Node) -> None:
    given = _arguments(node, "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    kernel = given["kernel_size"]
    add_max_pool(builder,
        kernel, given.get("stride") or kernel, given.get("padding", 0), given.get("dilation", 1),
        given.get("ceil_mode", False),
    )  # fmt: skip


def add_max_pool(builder: Builder, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> None:
    if _pair(padding) != (0, 0) or _pair(dilation) != (1, 1) or ceil_mode or math.prod(_pair(kernel)) > 200:
        raise Unsupported("it has a max pooling with padding, dilation, ceil_mode or a very large window")
    last = builder.unfinished(CONV)
    if last is not None and last.output == (last.oc, last.ch, last.cw):
        (qh, qw), (rh, rw) = _pair(kernel), _pair(stride)
        oh, ow = (last.ch - qh) // rh + 1, (last.cw - qw) // rw + 1
        builder.finish(last._replace(oh=oh, ow=ow, qh=qh, qw=qw, rh=rh, rw=rw))
    else:
        add_window(builder, MAX_POOL, _pair(kernel), _pair(stride))


def add_average_pool(builder: Builder, pool: nn.AvgPool2d) -> None:
    if _pair(pool.padding) != (0, 0) or pool.ceil_mode or pool.divisor_override:
        raise Unsupported("it has an average pooling with padding, ceil_mode or divisor_override")
    add_window(builder, AVERAGE_POOL, _pair(pool.kernel_size), _pair(pool.stride))


def add_mean(builder: Builder, node: fx.Node) -> None:
    """Over all pixels of an image."""
    given = _arguments(node, "input", "dim", "keepdim")
    axes = given.get("dim")
    if builder.flat or not isinstance(axes, tuple | list) or sorted(axis % 4 for axis in axes) != [2, 3]:
        raise Unsupported("it has a mean over something else than all pixels")
    add_window(builder, AVERAGE_POOL, builder.size[1:], builder.size[1:])
    if not given.get("keepdim", False):
        add_flatten(builder)


def add_every_other_pixel(builder: Builder, node: fx.Node) -> None:
    """x[:, :, ::s, ::s]"""
    index: Any = node.args[1]
    whole = isinstance(index, tuple) and len(index) == 4 and all(
        isinstance(part, slice) and part.start is None and part.stop is None for part in index
    )  # fmt: skip
    steps = [part.step or 1 for part in index] if whole else []
    if builder.flat or steps[:2] != [1, 1] or not all(isinstance(step, int) for step in steps):
        raise Unsupported("it has an index other than x[:, :, ::s, ::s] of an image")
    c, h, w = builder.size
    sh, sw = steps[2:]
    builder.append(builder.layer(SUBSAMPLE, (c, -(-h // sh), -(-w // sw)), sh=sh, sw=sw))


def add_padded_channels(builder: Builder, node: fx.Node) -> None:
    """F.pad(x, (0, 0, 0, 0, front, behind)): channels of zeros."""
    given = _arguments(node, "input", "pad", "mode", "value")
    pad, plain = given["pad"], given.get("mode", "constant") == "constant" and not given.get("value")
    if builder.flat or not plain or len(pad) != 6 or any(pad[:4]) or min(pad) < 0:
        raise Unsupported("it has a padding of something else than channels by zeros")
    c, h, w = builder.size
    last = builder.unfinished(SUBSAMPLE)
    if last is not None and last.oc == last.c:
        builder.finish(last._replace(oc=c + pad[4] + pad[5], ph=pad[4]))
    else:
        builder.append(builder.layer(SUBSAMPLE, (c + pad[4] + pad[5], h, w), ph=pad[4]))


def add_window(builder: Builder, kind: int, kernel: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if builder.flat:
        raise Unsupported("it pools vectors")
    c, h, w = builder.size
    (kh, kw), (sh, sw) = kernel, stride
    builder.append(builder.layer(kind, (c, (h - kh) // sh + 1, (w - kw) // sw + 1), kh=kh, kw=kw, sh=sh, sw=sw))


def flattens(step: Any, node: fx.Node) -> bool:
    if isinstance(step, nn.Flatten):
        return (step.start_dim, step.end_dim) == (1, -1)
    arguments = (*node.args[1:], *node.kwargs.values())
    return (step is torch.flatten or step == "flatten") and arguments in ((1,), (1, -1))


def add_flatten(builder: Builder) -> None:
    c, h, w = builder.size
    if not builder.flat and c > 1 and h * w > 1:
        builder.append(builder.layer(TO_CHANNELS_FIRST, builder.size))
    builder.current = builder.current._replace(size=(c * h * w, 1, 1), flat=True)


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (operator.getitem(value, 0), operator.getitem(value, 1))
