"""Steps of a trace that vectors take, or images and vectors alike: dense and recurrent layers, norms, sums."""

import struct

from torch import fx, nn

from fedmoe.native.builder import Builder, Value
from fedmoe.native.layers import (
    ADD,
    CONV,
    DENSE,
    EMBEDDING_MEAN,
    GROUP_NORM,
    INPUT,
    LSTM,
    MOST_WORDS,
    NONE,
    RELU,
    Layer,
    Size,
    Unsupported,
)
from fedmoe.native.recurrent import Recurrence


def add_linear(builder: Builder, linear: nn.Linear) -> None:
    if not builder.flat:
        raise Unsupported("it has a dense layer on the last axis of an image")
    builder.expect(linear.in_features)
    where = builder.parameter(linear.weight), builder.parameter(linear.bias)
    builder.append(builder.layer(DENSE, (linear.out_features, 1, 1), weight=where[0], bias=where[1]))


def add_embedding_mean(builder: Builder, bag: nn.EmbeddingBag) -> None:
    if builder.current.layer != INPUT or not builder.flat:
        raise Unsupported("it has an embedding of something else than its input, a vector of words")
    if bag.mode != "mean" or bag.padding_idx is not None or bag.max_norm is not None or bag.sparse:
        raise Unsupported("it has an EmbeddingBag with more to it than a mean")
    if bag.num_embeddings > MOST_WORDS:
        raise Unsupported(f"it has an EmbeddingBag of {bag.num_embeddings} rows, more than float32 counts exactly")
    at = builder.parameter(bag.weight)
    builder.append(builder.layer(EMBEDDING_MEAN, (bag.embedding_dim, 1, 1), weight=at))


def add_recurrence(builder: Builder, found: Recurrence) -> None:
    """The fields of a layer as `Recurrent` in lstm_rows.h reads them."""
    if found.obstacle:
        raise Unsupported(f"it has {found.obstacle}")
    words = found.embedding
    if builder.current.layer != INPUT or builder.input_axes != (2 if words is None else 1):
        raise Unsupported("it has an LSTM of something else than its input, words or vectors one after another")
    if words is not None and words.num_embeddings > MOST_WORDS:
        raise Unsupported(f"it has an Embedding of {words.num_embeddings} rows, more than float32 counts exactly")
    embedded = builder.size[1] if words is None else words.embedding_dim
    if embedded != found.lstms[0].input_size:
        raise Unsupported(f"an LSTM for {found.lstms[0].input_size} inputs would get {embedded}")
    at = builder.parameter(None if words is None else words.weight)
    first, *_ = [builder.parameter(parameter) for parameter in found.parameters()]
    frozen_row = -1 if words is None or words.padding_idx is None else words.padding_idx
    layer = builder.layer(
        LSTM, (found.width, 1, 1), kh=found.levels, kw=found.directions, sh=found.read_out, sw=int(found.ragged),
        ph=int(found.lstms[0].bidirectional), pw=int(found.lstms[0].bias), qh=embedded, qw=frozen_row, weight=at,
        bias=first,
    )  # fmt: skip
    builder.append(layer)
    builder.current = builder.current._replace(flat=True)
    if found.head is not None:
        add_linear(builder, found.head)


def add_norm(builder: Builder, norm: nn.GroupNorm | nn.LayerNorm, size: Size, groups: int) -> None:
    where = builder.parameter(norm.weight), builder.parameter(norm.bias)
    layer = builder.layer(GROUP_NORM, size, groups=groups, weight=where[0], bias=where[1])
    builder.append(layer._replace(epsilon_bits=struct.unpack("<q", struct.pack("<d", norm.eps))[0]))


def add_layer_norm(builder: Builder, norm: nn.LayerNorm) -> None:
    if not builder.flat or len(norm.normalized_shape) != 1:
        raise Unsupported("it has a LayerNorm of something else than a vector")
    add_norm(builder, norm, builder.expect(norm.normalized_shape[0]), groups=1)


def add_relu(builder: Builder) -> None:
    last = builder.unfinished(CONV, DENSE, GROUP_NORM, ADD)
    if last is not None and not last.relu:
        builder.finish(last._replace(relu=1))  # relu and max pooling commute, so either order is one block
    else:
        add_elementwise(builder, RELU)


def add_elementwise(builder: Builder, kind: int) -> None:
    builder.append(builder.layer(kind, builder.size))


def add_sum(builder: Builder, node: fx.Node, inputs: list[Value]) -> None:
    if node.kwargs or len(node.args) != 2 or not all(isinstance(part, fx.Node) for part in node.args):
        raise Unsupported("it adds something else than two layers' outputs")
    first, second = inputs[0], inputs[-1]
    if (first.size, first.flat) != (second.size, second.flat):
        raise Unsupported(f"it adds outputs of sizes {first.size} and {second.size}")
    for builder.current, other in ((second, first), (first, second)):
        norm = builder.unfinished(GROUP_NORM)
        if norm and norm.second == NONE and not norm.relu and other != builder.current:
            builder.run_last(builder.current.layer)  # when both are there
            builder.finish(norm._replace(second=other.layer))
            return
    builder.append(Layer(ADD, *first.size, *first.size, source=first.layer, second=second.layer))
