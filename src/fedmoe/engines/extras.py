"""Packages that only some engines need. A missing one is said with the command that installs it."""

import importlib
from typing import Any

from fedmoe.errors import ConfigError


def require(module: str, extra: str) -> Any:
    """The module, which the extra of this name brings."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"engine.name={extra!r} needs the package {module.partition('.')[0]!r}, which cannot be imported "
            f"({error}). Install it: pip install 'fedmoe[{extra}]'."
        ) from error
