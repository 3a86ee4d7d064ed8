"""What may cross the wire: messages, as named tensors in safetensors. There is no encoder for private state.

An algorithm declares its broadcasts, updates and reports with `@message`; nothing else can be encoded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch

from fedmoe import trees
from fedmoe.core_types import Tensors, Tree
from fedmoe.encoding import decode_tensors, encode_tensors
from fedmoe.errors import MessageError
from fedmoe.framing import Bytes, Parts
from fedmoe.framing import pack as pack
from fedmoe.framing import unpack as unpack

T = TypeVar("T")


class ExpertFields(NamedTuple):
    """The fields of a message that hold several experts side by side, and say which they are."""

    experts: str  # a dict of tensors (H, ...)
    expert_ids: str  # int64 (H,), each expert once


@overload
def message(kind: type[T]) -> type[T]: ...
@overload
def message(*, experts: str, expert_ids: str) -> Callable[[type[T]], type[T]]: ...
def message(kind: type[T] | None = None, *, experts: str = "", expert_ids: str = "") -> Any:
    """Declare a NamedTuple as a broadcast, an update or a report: something that may be sent.

    A message with several experts names the field that holds them and the field with their ids: then a
    client may send fewer experts than it received, and checks and manifests go by expert.

    >>> @message(experts="experts", expert_ids="expert_ids")
    ... class Update(NamedTuple):
    ...     experts: Tensors
    ...     expert_ids: torch.Tensor
    """

    def declare(kind: type[T]) -> type[T]:
        if missing := {experts, expert_ids} - {""} - set(getattr(kind, "_fields", ())):
            raise MessageError(f"{kind.__name__} has no field {min(missing)!r}, which @message names.")
        kind.may_be_sent = True  # type: ignore[attr-defined]
        kind.expert_fields = ExpertFields(experts, expert_ids) if experts else None  # type: ignore[attr-defined]
        return kind

    return declare if kind is None else declare(kind)


def expert_fields(kind: type[Any]) -> ExpertFields | None:
    """What a message declared of its experts."""
    found: ExpertFields | None = getattr(kind, "expert_fields", None)
    return found


def encode(tree: Tree) -> Parts:
    """Named tensors of a declared message, as the parts of a blob."""
    _require_message(tree)
    return encode_tensors(trees.to_named(tree))


def encode_reply(update: Tree, report: Tree) -> Parts:
    """An update and the report with it, as one message."""
    _require_message(update)
    _require_message(report)
    return encode_tensors(trees.to_named({"update": update, "report": report}))


def decode_reply(data: Bytes) -> tuple[Tensors, Tensors]:
    """The named tensors of the update and of the report."""
    parts: dict[str, Tensors] = {"update": {}, "report": {}}
    for name, tensor in decode_tensors(data).items():
        part, _, rest = name.partition("/")
        if part not in parts or not rest:
            raise MessageError(f"a reply holds {name!r}, which belongs neither to the update nor to the report.")
        parts[part][rest] = tensor
    return parts["update"], parts["report"]


def _require_message(tree: Tree) -> None:
    if not getattr(type(tree), "may_be_sent", False):
        raise MessageError(
            f"{type(tree).__name__} is not declared as a message, so it may not leave its owner. "
            "Only broadcasts, updates and reports are sent; declare such a type with @message."
        )


def decode(kind: type[T], data: Bytes) -> T:
    return trees.from_named(kind, decode_tensors(data))


def by_expert(kind: type[Any], named: Tensors) -> Tensors:
    """Names that tell experts apart, for a message of a type that declares some: what checks and manifests count by.

    >>> @message(experts="experts", expert_ids="ids")
    ... class Update(NamedTuple):
    ...     experts: Tensors
    ...     ids: torch.Tensor
    ...     phi: torch.Tensor
    >>> tensors = {"ids": torch.tensor([0, 2]), "experts/bias": torch.zeros(2, 5), "phi": torch.zeros(3)}
    >>> sorted(by_expert(Update, tensors))
    ['experts/0/bias', 'experts/2/bias', 'ids', 'phi']
    """
    fields = expert_fields(kind)
    if fields is None:
        return named
    expert_ids = read_expert_ids(fields, named)
    apart: Tensors = {}
    prefix = f"{fields.experts}/"
    for name, tensor in named.items():
        if not name.startswith(prefix):
            apart[name] = tensor
            continue
        if tensor.shape[:1] != (len(expert_ids),):
            raise MessageError(
                f"{name} has shape {tuple(tensor.shape)}, not a row for each of {len(expert_ids)} {fields.expert_ids}."
            )
        for number, expert in zip(expert_ids, tensor, strict=True):
            apart[f"{prefix}{number}/{name.removeprefix(prefix)}"] = expert
    return apart


def read_expert_ids(fields: ExpertFields, named: Tensors) -> list[int]:
    """Which experts a message holds, each once."""
    tensor = named.get(fields.expert_ids)
    if tensor is None:
        raise MessageError(f"it lacks {fields.expert_ids!r}, the ids of its experts.")
    expert_ids: list[int] = tensor.tolist() if tensor.dtype == torch.int64 and tensor.dim() == 1 else []
    if tensor.shape != (len(expert_ids),) or len(set(expert_ids)) != len(expert_ids):
        raise MessageError(
            f"{fields.expert_ids} is {tensor.dtype} {tuple(tensor.shape)}, not torch.int64 (H,) with each expert once."
        )
    return expert_ids
