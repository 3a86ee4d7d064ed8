"""Trees of tensors: map, stack, name, and read back.

A tree is a tensor, a dict, or a (named) tuple of trees, and nothing else; so these few lines are ten times faster than
PyTorch's own helpers, which know many types (and are private). A round of small models spends its time here.

A leaf's name is the path to it, joined by "/": ``State(model={"fc.weight": ...})`` has the leaf ``model/fc.weight``.
"""

from collections import namedtuple
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from fedmoe.core_types import Tensors, Tree
from fedmoe.encoding import encode_tensors
from fedmoe.errors import MessageError

T = TypeVar("T")
MAX_LEVELS = 32  # of names that are read; trees are walked by recursion, so their depth must have an end


def tree_map(function: Callable[..., Any], tree: T, *others: Tree) -> T:
    """Apply `function` leaf by leaf.

    >>> tree_map(lambda a: a + 1, {"a": torch.zeros(1)})
    {'a': tensor([1.])}
    """
    return cast("T", _map(function, tree, others))


def _map(function: Callable[..., Any], tree: Tree, others: Sequence[Tree]) -> Tree:
    if isinstance(tree, dict):
        return {name: _map(function, child, [other[name] for other in others]) for name, child in tree.items()}
    if isinstance(tree, tuple):
        return _like(tree, [_map(function, *parts) for parts in _side_by_side(tree, others)])
    return function(tree, *others)


def _side_by_side(tree: tuple[Tree, ...], others: Sequence[Tree]) -> Iterator[tuple[Tree, list[Tree]]]:
    for place, child in enumerate(tree):
        yield child, [other[place] for other in others]


def _like(tree: tuple[Tree, ...], children: list[Tree]) -> Tree:
    return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)


def leaves(tree: Tree) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(child)]


def stack(trees: Sequence[T]) -> T:
    """Put trees of one structure side by side: every leaf gets a leading client axis.

    A cohort that shares one object gets a view of it, not copies.
    """
    if all(tree is trees[0] for tree in trees):
        return tree_map(lambda leaf: leaf.expand(len(trees), *leaf.shape), trees[0])
    return tree_map(lambda *leaf: torch.stack(leaf), trees[0], *trees[1:])


def unstack(tree: Tree, size: int) -> list[Tree]:
    """The tree of each client of a stacked tree."""
    if isinstance(tree, Tensor):
        return list(tree.unbind())
    if isinstance(tree, dict):
        columns = [unstack(child, size) for child in tree.values()]
        rows = zip(*columns, strict=True) if columns else [()] * size
        return [dict(zip(tree, row, strict=True)) for row in rows]
    parts = [unstack(child, size) for child in tree]
    return [_like(tree, [part[s] for part in parts]) for s in range(size)]


def pick(tree: T, index: int) -> T:
    """The tree of one client of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def take(tree: T, places: Tensor) -> T:
    """The trees of some clients of a stacked tree, still stacked."""
    return tree_map(lambda leaf: leaf[places], tree)


def put(tree: T, places: Tensor, part: T) -> T:
    """A stacked tree in which some clients have others, given stacked."""
    return tree_map(lambda leaf, new: leaf.index_copy(0, places, new), tree, part)


def to_named(tree: Tree) -> Tensors:
    """Name every leaf by its path.

    >>> sorted(to_named({"gate": {"weight": torch.zeros(1)}, "bias": torch.zeros(1)}))
    ['bias', 'gate/weight']
    """
    named: Tensors = {}
    _collect(tree, "", named)
    return named


def _collect(tree: Tree, path: str, named: Tensors) -> None:
    if isinstance(tree, Tensor):
        named[path] = tree
        return
    children = tree.items() if isinstance(tree, dict) else zip(tree._fields, tree, strict=True)
    for name, child in children:
        if not name or "/" in name:
            raise MessageError(
                f"the name {name!r} is empty or holds a '/', which separates the levels of a tree: rename it."
            )
        _collect(child, f"{path}/{name}" if path else name, named)


def to_bytes(tree: Tree, metadata: dict[str, str] | None = None) -> bytes:
    """Named tensors as safetensors."""
    return b"".join(encode_tensors(to_named(tree), metadata))


def from_named(kind: type[T], named: Mapping[str, Tensor]) -> T:
    """Read a tree back: `kind` is its NamedTuple type; fields that are not NamedTuples are tensors or dicts.

    Raises MessageError for a name that `kind` does not declare, or a tensor that is missing.
    """
    declared = _declared(cast("Hashable", kind))
    for name in sorted(named):
        field, within, _ = name.partition("/")
        if field not in declared:
            raise MessageError(f"{kind.__name__} has no field {field!r}; it has {', '.join(declared)}.")
        if bool(within) == (declared[field] is Tensor):
            raise MessageError(f"{kind.__name__} declares {field!r} otherwise: {name!r} does not fit it.")
    fields = {name: _read_field(kind.__name__, name, hint, named) for name, hint in declared.items()}
    return kind(**fields)


@cache
def _declared(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read_field(kind: str, name: str, hint: Any, named: Mapping[str, Tensor]) -> Tree:
    if hint is Tensor:
        if name not in named:
            raise MessageError(f"{kind} lacks its tensor {name!r}: the sender runs another version or algorithm.")
        return named[name]
    inner = {key[len(name) + 1 :]: value for key, value in named.items() if key.startswith(name + "/")}
    return from_named(hint, inner) if hasattr(hint, "_fields") else nested(inner)


def record_type(name: str, fields: Mapping[str, Any]) -> Any:
    """A NamedTuple type whose fields are known at run time only: what another algorithm has, and something beside it.

    >>> record_type("Pair", {"first": Tensor, "second": Tensor})._fields
    ('first', 'second')
    """
    made: Any = namedtuple(name, list(fields))  # type: ignore[misc]
    made.__annotations__ = dict(fields)
    return made


def nested(named: Mapping[str, Tensor]) -> Tree:
    """Dicts within dicts from names with '/': the inverse of `to_named` for dicts."""
    tree: dict[str, Tree] = {}
    for path, value in sorted(named.items()):  # so "a" comes before "a/b"
        *parents, last = levels = path.split("/")
        if "" in levels or len(levels) > MAX_LEVELS:
            raise MessageError(f"{path!r} does not name a tensor: it has an empty level, or more than {MAX_LEVELS}.")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise MessageError(f"{path!r} lies within {parent!r}, which is a tensor itself.")
        node[last] = value
    return tree
