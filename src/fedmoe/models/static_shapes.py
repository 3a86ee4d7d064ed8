"""While a model is traced, shapes may not depend on the values of x: what saves time by them asks here first."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_static: ContextVar[bool] = ContextVar("static shapes", default=False)


@contextmanager
def static_shapes() -> Iterator[None]:
    token = _static.set(True)
    try:
        yield
    finally:
        _static.reset(token)


def shapes_are_static() -> bool:
    return _static.get()
