"""Recurrent networks in a traced module: embedding, LSTM and the state that is read, as one step for the kernels.

A module may say itself what it is, by a method ``kernel_recurrence() -> Recurrence | None``: then nobody looks into its
forward.
In any other the pattern is found: ``lstm(embedding(x))``, and of its output the last states, the last step or the mean.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

FINAL_STATES, LAST_OUTPUT, MEAN_OUTPUT = range(3)  # as in lstm_rows.h
READ_OUTS = ("final states", "last output", "mean output")


class Recurrence(NamedTuple):
    """`lstms` is one, or two of one direction each: the second reads from the end, and neither reads the other.

    `ragged`: words of number 0 are padding, wherever they are, and are not read.
    """

    embedding: nn.Embedding | None
    lstms: tuple[nn.LSTM, ...]
    read_out: int
    ragged: bool = False
    head: nn.Linear | None = None

    @property
    def levels(self) -> int:
        return int(self.lstms[0].num_layers)

    @property
    def directions(self) -> int:
        return len(self.lstms) * (1 + self.lstms[0].bidirectional)

    @property
    def width(self) -> int:
        return int(self.directions * self.lstms[0].hidden_size)

    @property
    def obstacle(self) -> str | None:
        """What of it the kernels do not know."""
        words = self.embedding
        if words is not None and (words.max_norm is not None or words.scale_grad_by_freq or words.sparse):
            return "an Embedding with max_norm, scale_grad_by_freq or sparse gradients"
        for lstm in self.lstms:
            if not lstm.batch_first or lstm.proj_size or (lstm.dropout and lstm.num_layers > 1):
                return "an LSTM with dropout or proj_size, or without batch_first"
        return None

    def parameters(self) -> list[torch.Tensor]:
        """Of the LSTMs, in the order of the kernels: level by level, in each direction by direction."""
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.lstms[0].bias else [])]
        ways = ["", "_reverse"][: 1 + self.lstms[0].bidirectional]
        return [
            getattr(lstm, f"{name}_l{level}{way}")
            for level in range(self.levels)
            for lstm in self.lstms
            for way in ways
            for name in names
        ]


class Tracer(fx.Tracer):
    """Looks into every module but torch's own and those that say what they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return recurrence_of(m) is not None or super().is_leaf_module(m, module_qualified_name)


class _Found(nn.Module):
    """Stands for the pattern in a traced module."""

    def __init__(self, found: Recurrence) -> None:
        super().__init__()
        self.kernel_recurrence = lambda: found


def recurrence_of(module: nn.Module | None) -> Recurrence | None:
    says = getattr(module, "kernel_recurrence", None)
    return cast(Callable[[], Recurrence | None], says)() if callable(says) else None


def traced(module: nn.Module) -> fx.GraphModule:
    """The module's steps, of which each recurrence is one."""
    tracer = Tracer()
    whole = fx.GraphModule(module, tracer.trace(module))
    whole.graph.eliminate_dead_code()
    for node in list(whole.graph.nodes):
        lstm = _module_of(whole, node)
        if isinstance(lstm, nn.LSTM) and len(node.args) == 1:
            _replace(whole, node, lstm)
    return whole


def _replace(whole: fx.GraphModule, node: fx.Node, lstm: nn.LSTM) -> None:
    """One step in place of those from the embedding to what is read, where the kernels know it."""
    before = node.args[0]
    read = _read_out(node, lstm)
    if read is None or not isinstance(before, fx.Node):
        return
    last, read_out = read
    words = _module_of(whole, before)
    embedding = words if isinstance(words, nn.Embedding) and len(before.users) == 1 else None
    first = before.args[0] if embedding is not None else before
    name = f"recurrence_of_{node.name}"
    whole.add_submodule(name, _Found(Recurrence(embedding, (lstm,), read_out)))
    with whole.graph.inserting_after(last):
        last.replace_all_uses_with(whole.graph.call_module(name, (first,)))
    whole.graph.eliminate_dead_code()


def _module_of(whole: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return whole.get_submodule(str(node.target)) if node.op == "call_module" else None


def _read_out(node: fx.Node, lstm: nn.LSTM) -> tuple[fx.Node, int] | None:
    """The node whose value is the state that is read, and which one that is."""
    (part, *others) = node.users
    if others or part.target is not operator.getitem or len(part.users) == 0:
        return None
    if part.args[1] == 0:
        (read, *others) = part.users
        index = read.args[1] if read.target is operator.getitem else None
        if not others and index in ((slice(None), -1), (slice(None), -1, slice(None))):
            return read, LAST_OUTPUT
        return (read, MEAN_OUTPUT) if not others and _is_mean_over_time(read) else None
    (states, *others) = part.users
    if others or states.target is not operator.getitem or states.args[1] != 0:
        return None
    return _final_states(states, 1 + lstm.bidirectional, int(lstm.num_layers))


def _is_mean_over_time(node: fx.Node) -> bool:
    arguments = (*node.args[1:], *node.kwargs.values())
    return (node.target is torch.mean or node.target == "mean") and arguments in ((1,), (-2,))


def _final_states(states: fx.Node, directions: int, levels: int) -> tuple[fx.Node, int] | None:
    """h[-1] of one direction, or both states of the last level side by side."""
    picks, cells = list(states.users), levels * directions
    if any(pick.target is not operator.getitem or not isinstance(pick.args[1], int) for pick in picks):
        return None
    by_place = {cast(int, pick.args[1]) % cells: pick for pick in picks}
    last_level = [by_place.get(place) for place in range(cells - directions, cells)]
    if len(picks) != directions or None in last_level:
        return None
    if directions == 1:
        return picks[0], FINAL_STATES
    readers = {reader for pick in picks for reader in pick.users}
    joined = readers.pop()
    axis = (*joined.args[1:], *joined.kwargs.values())
    if readers or joined.target not in (torch.cat, torch.concat) or axis not in ((1,), (-1,)):
        return None
    return (joined, FINAL_STATES) if list(cast(list[Any], joined.args[0])) == last_level else None
