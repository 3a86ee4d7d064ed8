"""Paths as people write them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from fedmoe.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """`~` is the user's home folder.

    >>> expanded("~/data") == Path.home() / "data", str(expanded("data/~a"))
    (True, 'data/~a')
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # an unknown user, or no home folder
        raise ConfigError(f"the path {str(path)!r} cannot be expanded: {error} Write it without '~'.") from error


# Of a config. Absolute, so that the config which a run records means the same files wherever it is read again.
FilePath = Annotated[Path, AfterValidator(lambda path: expanded(path).absolute())]
