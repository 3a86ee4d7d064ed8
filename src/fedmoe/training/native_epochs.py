"""Whole epochs in the native kernels: no Python between a client's batches.

The kernels read and write memory without looking, so everything that they are given passes `native_checks`: names and
shapes of parameters once for each layout, the rest at every fit.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.core_types import Tensors, Tree
from fedmoe.native.trainer import (
    CLASSIFIER,
    ClientTable,
    ClientTensors,
    Objective,
    OptimizerSettings,
    Steps,
    Trainer,
)
from fedmoe.streams import Streams
from fedmoe.training.corrections import Corrections
from fedmoe.training.flat import Layout
from fedmoe.training.group import Group
from fedmoe.training.kernel_spec import KernelSpec
from fedmoe.training.native_checks import (
    Kernels,
    check_labels,
    check_layout,
    check_weights,
    checked_rows,
    checked_state,
    readable_images,
    second_at_labels,
)
from fedmoe.training.optimizers import Adam, Optimizer

OF_THE_FIRST_GROUP = ("proximal", "gradient_offset", "trained_names", "max_gradient_norm", "rates")


class NativeEpochs(NamedTuple):
    """One group of a cohort, as the kernels read and write it."""

    trainer: Trainer
    table: ClientTable
    counts: list[int]
    batch_size: int
    generators: list[torch.Generator]
    rates_S: list[Tensor] | None = None  # of each client at each of its steps, float64; None: the optimizer's

    def run(self, clients: Sequence[int], steps_S: Sequence[int], steps_before_S: Sequence[int]) -> list[float]:
        """The next steps of some clients: an epoch, or all steps of a schedule that counts them. Their losses' sums."""
        size = self.batch_size
        tasks = [
            Steps(
                s,
                shuffled(self.generators[s], self.counts[s], size, steps_S[s]),
                ends_of_batches(self.counts[s], size, steps_S[s]),
                steps_before_S[s],
                None if self.rates_S is None else self.rates_S[s][steps_before_S[s] :][: steps_S[s]],
            )
            for s in clients
        ]
        return self.trainer.run(self.table, tasks)


def kernel_spec_of(groups: Mapping[str, Group], frozen: Tree) -> KernelSpec | str:
    """What the kernels need for whole epochs; or the reason why each step goes through Python."""
    name, group = next(iter(groups.items()))
    spec_of = getattr(group.loss, "kernel_spec", None)  # isinstance with a Protocol costs a tenth of a small epoch
    if spec_of is None:
        label = getattr(group.loss, "__qualname__", type(group.loss).__qualname__)
        return f"group {name!r} has a loss of its own, {label}, which the kernels do not know"
    spec: KernelSpec | str = spec_of(group.params, group.data, frozen)
    if isinstance(spec, str):
        return f"group {name!r}: {spec}"
    for network in spec.networks.values():
        if network.native is None:
            return f"group {name!r}: the {network.name} does not run natively"
    known = {name} | (spec.objective.other_groups if spec.objective else set())
    if groups.keys() != known:
        return f"the groups {', '.join(map(repr, groups))} are trained together"
    for other in known - {name}:
        for feature in OF_THE_FIRST_GROUP:
            if getattr(groups[other], feature) is not None:
                return f"group {other!r} has {feature} beside {name!r}"
        if groups[other].optimizer.weight_decay:
            return f"group {other!r} has weight decay beside {name!r}"
    for feature in ("batch_term", "noise", "augmentation"):
        if getattr(group, feature):
            return f"group {name!r} has {'an' if feature[0] == 'a' else 'a'} {feature}"
    return spec


def native_epochs(
    groups: Mapping[str, Group],
    spec: KernelSpec,
    layouts: Mapping[str, Layout],
    flat: Mapping[str, Tensor],
    optimizer_state: Tensors,
    corrections: Corrections,
    rates_S: list[Tensor] | None,
    batch_size: int,
    rng: Streams,
) -> NativeEpochs:
    """For the first group, whose `spec` is; raises MessageError or DataError for what is of another model."""
    name, group = next(iter(groups.items()))
    kernels = tuple((prefix, network.native) for prefix, network in spec.networks.items() if network.native)
    function = spec.objective.function if spec.objective else CLASSIFIER
    beside = tuple(spec.objective.shapes.items()) if spec.objective else ()
    layout = layouts[name]
    bound = _bound_trainer(
        kernels, layout.names, layout.shapes, group.trained_names, group.optimizer, corrections.strength,
        corrections.max_norm, spec.num_copies, beside, function,
    )  # fmt: skip
    counts = group.data.counts.tolist()
    size = len(counts)
    check_weights(group.params, flat[name], size)
    images = readable_images([kernel for _, kernel in kernels], group.data, counts)
    num_outputs = kernels[0][1].program.num_outputs
    check_labels(group.data.y, num_outputs)
    objective = spec.objective.bind(bound.starts, flat) if spec.objective else Objective(CLASSIFIER)
    tensors = ClientTensors(
        images,
        group.data.y.contiguous(),
        second_at_labels(spec.second_SNC, group.data),
        checked_rows(spec.logit_offset_SC, "the logit offset", (size, num_outputs)),
        checked_rows(spec.score_offset_SNC, "the score offset", (*group.data.y.shape, num_outputs)),
        checked_rows(spec.class_weight_SC, "the class weights", (size, num_outputs)),
        flat[name],
        *checked_state(group.optimizer, optimizer_state, flat[name]),
        checked_rows(corrections.anchor_SP, "the weights to be pulled to", flat[name].shape),
        checked_rows(corrections.offset_SP, "the gradient offset", flat[name].shape),
    )
    table, generators = ClientTable(tensors, objective), rng.generators("batches")
    return NativeEpochs(bound.trainer, table, counts, batch_size, generators, rates_S)


class _BoundTrainer(NamedTuple):
    trainer: Trainer
    starts: dict[str, int]  # where each tensor lies in a client's vector


@lru_cache(maxsize=16)
def _bound_trainer(
    kernels: Kernels,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    trained_names: frozenset[str] | None,
    optimizer: Optimizer,
    strength: float,
    max_norm: float | None,
    num_copies: int | None,
    beside: tuple[tuple[str, tuple[int, ...]], ...],
    function: str,
) -> _BoundTrainer:
    """Cached by the layout of the parameters, which is compared here with that of the kernels."""
    check_layout(dict(zip(names, shapes, strict=True)), kernels, num_copies, dict(beside))
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = dict(zip(names, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    offsets = [
        np.array([starts.get(prefix + param, -1) for param in kernel.program.params], dtype=np.int64)
        for prefix, kernel in kernels
    ]
    networks = [kernel for _, kernel in kernels]
    trained = frozenset(names) if trained_names is None else trained_names
    lowest = [
        kernel.first_layer_of([p for p in kernel.trained_names if prefix + p in trained]) for prefix, kernel in kernels
    ]
    if num_copies is not None:
        (expert,), (first,) = networks, offsets
        networks, lowest = [expert] * num_copies, lowest * num_copies
        offsets = [np.where(first < 0, first, first + h * expert.sizes) for h in range(num_copies)]
    ranges = _ranges([name in trained for name in names], sizes)
    settings = _settings(optimizer, strength, max_norm)
    return _BoundTrainer(Trainer(networks, offsets, lowest, settings, ranges, function), starts)


def _ranges(is_trained: Sequence[bool], sizes: Sequence[int]) -> NDArray[np.int64]:
    """(n, 2): begin and end of each stretch of trained tensors; neighbours are one stretch."""
    edges = np.diff(np.repeat([False, *is_trained, False], [1, *sizes, 1]).astype(np.int64))
    return np.ascontiguousarray(np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1))


def shuffled(generator: torch.Generator, count: int, batch_size: int, steps: int) -> Tensor:
    """The rows of `steps` batches one after another: the batches of `batches.shuffled`."""
    epochs = -(-steps // -(-count // batch_size))
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return orders[0] if epochs == 1 else torch.cat(orders)


@lru_cache(maxsize=1024)
def ends_of_batches(count: int, batch_size: int, steps: int) -> Tensor:
    """Where each batch ends in `shuffled`."""
    per_epoch = -(-count // batch_size)
    ends_of_epoch = (torch.arange(1, per_epoch + 1) * batch_size).clamp(max=count)
    starts = torch.arange(-(-steps // per_epoch))[:, None] * count
    return (starts + ends_of_epoch).flatten()[:steps]


def _settings(optimizer: Optimizer, strength: float, max_norm: float | None) -> OptimizerSettings:
    settings = OptimizerSettings(
        rate=optimizer.learning_rate, weight_decay=optimizer.weight_decay, proximal=strength, max_norm=max_norm or 0.0
    )
    if isinstance(optimizer, Adam):
        settings.beta1, settings.beta2, settings.epsilon = optimizer.beta1, optimizer.beta2, optimizer.epsilon
        settings.adam, settings.decoupled = True, optimizer.decoupled
    else:
        settings.momentum = optimizer.momentum
    return settings
