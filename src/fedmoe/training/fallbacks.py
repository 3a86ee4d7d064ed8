"""Where the native backend takes steps through Python instead of whole epochs in the kernels, and why.

Such a fit gives the same numbers, but may take several times as long: a user who asked for speed should know. A fit
reports to every recorder that is open in its process and thread.

>>> with record_fallbacks() as reasons:
...     report_fallback("group 'model' has a batch_term")
...     report_fallback("group 'model' has a batch_term")
>>> reasons
["group 'model' has a batch_term"]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_recorders: ContextVar[tuple[list[str], ...]] = ContextVar("fallback recorders", default=())


@contextmanager
def record_fallbacks() -> Iterator[list[str]]:
    """A list that receives the reason of every fit that falls back meanwhile, each reason once."""
    reasons: list[str] = []
    token = _recorders.set((*_recorders.get(), reasons))
    try:
        yield reasons
    finally:
        _recorders.reset(token)


def report_fallback(reason: str) -> None:
    for reasons in _recorders.get():
        if reason not in reasons:
            reasons.append(reason)


def fallback_note(reason: str) -> str:
    """A sentence for the user."""
    return f"whole epochs fall back to step by step in the native backend, which is slower: {reason}."
