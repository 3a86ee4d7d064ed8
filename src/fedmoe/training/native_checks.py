"""What the native kernels are given is what they expect: names, shapes, dtypes and ranges.

Weights may come from a server, a file or another model; the kernels would read and write out of bounds. Shape suffixes:
S clients of a cohort, N examples of a client, P parameters of a group, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Examples, Tensors, Tree
from fedmoe.errors import DataError, MessageError
from fedmoe.native.kernel import Kernel, check_tensor
from fedmoe.training.kernel_spec import Shapes
from fedmoe.training.optimizers import Adam, Optimizer

Kernels = tuple[tuple[str, Kernel], ...]  # by the prefix of their parameters' names


def check_layout(found: Shapes, kernels: Kernels, num_copies: int | None, beside: Shapes) -> None:
    """Every tensor of the group is one that the kernels train, of the shape that they expect, and none is missing."""
    axis = () if num_copies is None else (num_copies,)
    expected = dict(beside)
    for prefix, kernel in kernels:
        of_kernel = zip(kernel.trained_names, kernel.trained_shapes, strict=True)
        expected.update({prefix + name: (*axis, *shape) for name, shape in of_kernel})
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            has = f"has shape {found[name]}" if name in found else "is missing"
            wanted = f"shape {expected[name]}" if name in expected else "no such tensor"
            raise MessageError(
                f"{name} {has}, but {wanted} is expected: these weights are of another model. "
                "Train with weights of the model that this run was made for."
            )


def check_weights(params_S: Tree, flat_SP: Tensor, size: int) -> None:
    for name, tensor in trees.to_named(params_S).items():
        if tensor.dtype != torch.float32 or tensor.shape[:1] != (size,):
            check_tensor(name, tensor, (size, *tensor.shape[1:]))
    check_tensor("the clients' weights", flat_SP, (size, flat_SP.shape[1]))


def readable_images(kernels: Sequence[Kernel], data: Examples, counts: Sequence[int]) -> Tensor:
    """The examples as every one of the kernels can read them."""
    if data.x.shape[:2] != data.y.shape or len(data.y) != len(counts):
        raise DataError(
            f"examples of shape {tuple(data.x.shape)} and labels of shape {tuple(data.y.shape)} do not fit together "
            f"for {len(counts)} clients."
        )
    if min(counts) < 0 or max(counts) > data.y.shape[1]:
        raise DataError(f"clients have {counts} examples, but the data have {data.y.shape[1]} rows for each.")
    reader = next((kernel for kernel in kernels if kernel.pads_images), kernels[0])
    for kernel in kernels:
        if kernel is not reader:  # which checks them itself
            kernel.check_examples(data.x)
    return reader.images(data.x)


def check_labels(y_SN: Tensor, num_outputs: int) -> None:
    check_tensor("the labels", y_SN, y_SN.shape, torch.int64)
    lowest, highest = (int(label) for label in y_SN.aminmax()) if y_SN.numel() else (0, 0)
    if lowest < 0 or highest >= num_outputs:
        raise DataError(
            f"labels reach from {lowest} to {highest}, but the model has {num_outputs} outputs. "
            "Give it as many as there are labels."
        )


def second_at_labels(second_SNC: Tensor | None, data: Examples) -> Tensor | None:
    if second_SNC is None:
        return None
    check_tensor("the second expert's log-probabilities", second_SNC, (*data.y.shape, second_SNC.shape[-1]))
    if int(data.y.max() if data.y.numel() else 0) >= second_SNC.shape[-1]:
        raise DataError(f"the second expert predicts {second_SNC.shape[-1]} classes only.")
    return second_SNC.gather(-1, data.y.unsqueeze(-1)).squeeze(-1).contiguous()


def checked_rows(tensor: Tensor | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    check_tensor(name, tensor, shape)
    return tensor.contiguous()


def checked_state(optimizer: Optimizer, state: Tensors, flat_SP: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the kernels call mean and square: of Adam, or the velocity of SGD with momentum alone."""
    for name, tensor in state.items():
        check_tensor(f"the optimizer's {name}", tensor, flat_SP.shape)
    names = ("mean", "square") if isinstance(optimizer, Adam) else ("velocity",) if optimizer.momentum else ()
    if tuple(state) != names:
        raise MessageError(f"the optimizer state holds {', '.join(state) or 'nothing'}, but {names} is expected.")
    first, second = [*state.values(), None, None][:2]
    return first, second
