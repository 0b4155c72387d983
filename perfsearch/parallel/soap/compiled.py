"""Compilation of the simulator's inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile with numba at the first call, kept on disk for the next start."""
    return cast("_Function", numba.njit(cache=True, nogil=True)(function))


def inlined(function: _Function) -> _Function:
    """As ``compiled``, put into its caller's body, whose loop is too hot for a call."""
    return cast("_Function", numba.njit(cache=True, nogil=True, inline="always")(function))
