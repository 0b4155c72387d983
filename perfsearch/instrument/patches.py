"""Wrap constructors and methods of a library, and leave them alone where that is asked for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the original, the positional arguments (the object first) and the others; calls it."""

_local = threading.local()


@contextmanager
def untouched() -> Iterator[None]:
    """Let everything that is built inside the block be built as it is written."""
    before = getattr(_local, "off", False)
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


def wrap(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Let ``around`` stand before ``owner.name``; return a function that takes it away.

    On a class the wrapper serves every subclass, objects keep their class, and names that were
    imported before refer to the same class. A call inside of an ``untouched`` block goes straight
    to the original.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "off", False):
            return original(*args, **kwargs)
        return around(original, args, kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        setattr(owner, name, original)

    return undo


def once(function: Callable[[], None]) -> Callable[[], None]:
    """The function for its first call; later ones do nothing."""
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            function()

    return call
