"""A digest of what a module computes, apart from its weights: two modules with equal ones may exchange weights.

A run is bound to it, because weights of equal shapes fit a changed module (tanh for ReLU) and give nonsense there.
"""

import ast
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, fx, nn

PLAIN = (str, int, float, bool, type(None), torch.dtype)


def structure_fingerprint(module: nn.Module) -> str:
    """Of the module's types and their settings, its parameters' names and shapes, and how its forward connects them."""
    lines = [*_parts(module), *_tensors(module), _forward(module)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def tensors_digest(named: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and contents; "" of none."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(named.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest() if named else ""


def _parts(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        yield f"module {name}: {_qualified(type(part))}({part.extra_repr()}) {_settings(part)}"


def _settings(part: nn.Module) -> str:
    """Its plain attributes: a module need not name them in `extra_repr`."""
    attributes = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
    shown = {key: _shown(value) for key, value in attributes.items()}
    return ", ".join(f"{key}={value}" for key, value in sorted(shown.items()) if value is not None)


def _shown(value: object) -> str | None:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        items = [_shown(item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    if callable(value) and not isinstance(value, nn.Module):
        return _qualified(value) if hasattr(value, "__qualname__") else None
    return None


def _tensors(module: nn.Module) -> Iterator[str]:
    for name, parameter in sorted(module.named_parameters()):
        kind = "weight" if parameter.requires_grad else "frozen"
        yield f"{kind} {name}: {tuple(parameter.shape)} {parameter.dtype}"
    for name, buffer in sorted(module.named_buffers()):
        yield f"buffer {name}: {tuple(buffer.shape)} {buffer.dtype}"


def _forward(module: nn.Module) -> str:
    """The graph of what is called, functions included; the source of the classes where it cannot be traced."""
    try:
        graph = str(fx.symbolic_trace(module).graph)
    except Exception:  # whatever user code raises when it is traced
        return "\n".join(_sources(module))
    return re.sub(r" at 0x[0-9a-f]+", "", graph)


def _sources(module: nn.Module) -> Iterator[str]:
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    for kind in sorted(kinds, key=_qualified):
        if not kind.__module__.startswith("torch.") and kind is not object:
            yield f"source {_qualified(kind)}: {_source(kind)}"


def _source(kind: type) -> str:
    """Without comments and layout; the name alone of a class that was not read from a file."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return ""


def _qualified(thing: object) -> str:
    module = getattr(thing, "__module__", "")
    return f"{_script_name() if module == '__main__' else module}.{getattr(thing, '__qualname__', '')}"


def _script_name() -> str:
    """What others import the script as that runs now: a class of it is the same class there."""
    script = sys.modules["__main__"]
    spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
    return str(spec.name) if spec is not None else Path(file).stem if file else "__main__"
