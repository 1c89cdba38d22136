"""The seam where an onlooker sees, and a test may replace, what an operator returns."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Observer = Callable[[str, Any], Any]
"""Called with an operator's name and output; what it returns takes the output's place."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show every outermost operator call to `observer` while the block runs."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def operator(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as an operator. Operators called inside one are part of it and are not shown."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        observer = _observer.get()
        if observer is None:
            return fn(*args, **kwargs)
        token = _observer.set(None)
        try:
            out = fn(*args, **kwargs)
        finally:
            _observer.reset(token)
        return observer(fn.__name__, out)  # type: ignore[no-any-return]

    return run
